"""API keys from a file: several clients, and keys that change while the server runs."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend.http.keys import ApiKeys
from tests.frontend.conftest import Site, live
from tests.frontend.test_batches import begin, client_of, ended, line

ASK = {"prompt": "hello", "max_tokens": 2}
PATH = "/v1/responses"


async def status(site: Site, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return (await site.http.post("/v1/completions", json=ASK, headers=headers)).status_code


async def test_every_key_of_the_file_opens_and_no_other(
    make_site: Callable[..., Site], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("# name key\n\nalice one\n  bob   two  \nthree\n")
    site = make_site(api_key="zero", api_key_file=str(tmp_path / "keys"))
    with caplog.at_level(logging.INFO, "penstock.access"):
        assert [await status(site, key) for key in ("zero", "one", "two", "three")] == [200] * 4
        assert [await status(site, key) for key in ("alice", "bob", "", "#", "alice one", None)] == [401] * 6
    lines = [record.fields for record in caplog.records if record.name == "penstock.access"]  # type: ignore[attr-defined]
    assert [entry.get("key") for entry in lines] == [None, "alice", "bob", None, *[None] * 6]


async def test_a_holder_keeps_what_it_stored_when_its_key_changes(
    make_site: Callable[..., Site], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice one\nbob two\n")
    site = make_site(api_key_file=str(file), state_dir=str(tmp_path / "state"))
    site.says("hello")

    async def ask(method: str, path: str, key: str, **more: object) -> tuple[int, str]:
        answer = await site.http.request(method, path, headers={"authorization": f"Bearer {key}"}, **more)  # type: ignore[arg-type]
        return answer.status_code, answer.json().get("id", "")

    _, made = await ask("POST", PATH, "one", json={"input": "x", "max_output_tokens": 4})
    file.write_text("alice one\nalice new\nbob two\n")
    assert await ask("GET", f"{PATH}/{made}", "new") == (401, "")
    site.app.keys.reload()
    assert await ask("GET", f"{PATH}/{made}", "new") == (200, made)
    file.write_text("alice new\nbob two\n")
    site.app.keys.reload()
    assert await ask("GET", f"{PATH}/{made}", "one") == (401, "")
    assert await ask("GET", f"{PATH}/{made}", "new") == (200, made)
    assert (await ask("GET", f"{PATH}/{made}", "two"))[0] == 404


async def test_batches_of_every_holder_run(make_site: Callable[..., Site], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice one\nbob two\n")
    site = make_site(api_key_file=str(tmp_path / "keys"), state_dir=str(tmp_path / "state"))
    site.says("hello")
    async with live(site) as port:
        for key in ("one", "two"):
            async with client_of(port) as client:
                client.headers["authorization"] = f"Bearer {key}"
                made = await begin(client, line("a"))
                assert (await ended(client, made["id"]))["status"] == "completed"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no key; give one a line"),
        ("# only a comment\n", "has no key"),
        ("alice one\nalice one two\n", "line 2: give a key, or a name of at most 64 characters and a key"),
        ("alice ö\n", "line 1: give 1 to 4096 ASCII characters"),
        ("alice one\nbob one\n", "line 2: the key is there already"),
        (None, "cannot be read: no such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, words: str
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice one\n")
    keys = ApiKeys(file=str(file))
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ValueError, match="--api-key-file") as refused:
        ApiKeys(file=str(file))
    assert words in str(refused.value) and "one" not in str(refused.value).replace("give one", "")
    keys.reload()
    assert "the API keys stay as they are" in caplog.text and words in caplog.text
    assert keys.holder(b"one") is not None and keys.holder(b"two") is None and keys.required
