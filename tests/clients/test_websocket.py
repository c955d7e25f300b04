"""Chats over a WebSocket with SmolLM2, also through a gateway: many at a time give what HTTP gives, and a cancelled one
makes room."""

import json
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.e2e.server import Server, gauge
from tests.patience import wait_for

PROMPTS = ("Name a river.", "Name a lake.", "Count to five.", "Say hello.")


@pytest.fixture(params=["server", "gateway"])
def site(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "temperature": 0, **more}


def ended(opened: ClientConnection, ids: set[str]) -> dict[str, list[dict[str, Any]]]:
    """The events of requests until all of them have ended."""
    got: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
    while ids:
        event = json.loads(opened.recv(timeout=60))
        got[event["id"]].append(event)
        if event["type"] != "chunk":
            ids = ids - {event["id"]}
    return got


def test_chats_on_one_socket_equal_those_over_http(site: Server) -> None:
    with connect(site.url.replace("http", "ws") + "/v1/chat/ws") as opened:
        for prompt in PROMPTS:
            opened.send(json.dumps({"id": prompt, "body": body(prompt, stream=True)}))
        got = ended(opened, set(PROMPTS))
    for prompt in PROMPTS:
        text = "".join(event["chunk"]["choices"][0]["delta"].get("content", "") for event in got[prompt][:-1])
        whole = site.post("/v1/chat/completions", body(prompt)).json()
        assert text == whole["choices"][0]["message"]["content"] and got[prompt][-1]["type"] == "done"


def test_cancelled_chats_end_in_the_engine(site: Server, server: Server) -> None:
    running = "penstock_num_requests_running"
    with connect(site.url.replace("http", "ws") + "/v1/chat/ws") as opened:
        for i in range(6):
            opened.send(
                json.dumps({"id": str(i), "body": body("Count.", stream=True, ignore_eos=True, max_tokens=2000)})
            )
        wait_for(lambda: gauge(server.get("/metrics").text, running) == 6, "six requests to run")
        for i in range(6):
            opened.send(json.dumps({"id": str(i), "cancel": True}))
        got = ended(opened, {str(i) for i in range(6)})
        assert {events[-1]["type"] for events in got.values()} == {"cancelled"}
    wait_for(lambda: gauge(server.get("/metrics").text, running) == 0, "no request to run")
