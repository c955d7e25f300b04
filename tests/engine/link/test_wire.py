"""The words on the wire, and what is not one of them."""

import msgspec
import pytest

from penstock.engine.link.wire import (
    Abort,
    Add,
    Ask,
    Command,
    Control,
    ControlReply,
    Ended,
    Event,
    Finish,
    Ready,
    Rejected,
    Step,
    Stop,
    decode_command,
    decode_event,
    encode,
)
from penstock.messages import (
    EngineInfo,
    EngineStats,
    ForgottenBlocks,
    GenerateRequest,
    MemoryRow,
    RequestTiming,
    ResetCache,
    SamplingParams,
    TokenDelta,
)

REQUEST = GenerateRequest(
    request_id="r",
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(seed=2**64 - 1, max_tokens=3, logit_bias={5: -1.5}, logprobs=0),
    output_ids=(7,),
    deadline=2.5,
)
INFO = EngineInfo(
    model="m",
    revision="",
    vocab_size=50,
    max_model_len=64,
    max_num_seqs=4,
    block_size=16,
    num_blocks=(5, 6),
    dtype="float32",
    incarnation=2,
    pid=99,
    memory=(MemoryRow("weights", 5, "note"),),
)
DELTA = TokenDelta("r", 1, 5, (6, 7), "stop", 7, 3, b"\x00\xff", b"", "", RequestTiming(0.5), 2)


@pytest.mark.parametrize(
    "command",
    [
        Add(REQUEST, 5.5),
        Finish("r", 1, "stop", 4),
        Abort("r"),
        Control(3, ResetCache()),
        Ask(4, "load"),
        Stop("enough"),
    ],
    ids=repr,
)
def test_commands_arrive_as_sent(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "event",
    [
        Ready(INFO, EngineStats(blocks_total=(4, 5))),
        Ended("because"),
        Step(
            EngineStats(steps=4),
            [DELTA],
            [Rejected("x", "no", "deadline")],
            ["y"],
            [ControlReply(1, "", "no such"), ControlReply(2, ForgottenBlocks((3,)))],
        ),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_arrive_as_sent(event: Event) -> None:
    assert decode_event(encode(event)) == event


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": (1.5,)},
        {"prompt_ids": ("1",)},
        {"prompt_ids": (True,)},
        {"n": "2"},
        {"sampling": None},
        {"tenant": 5},
    ],
    ids=str,
)
def test_a_request_of_wrong_types_becomes_its_own_rejection(changes: dict[str, object]) -> None:
    rejected = decode_command(encode(Add(msgspec.structs.replace(REQUEST, **changes))))
    assert isinstance(rejected, Rejected)
    assert rejected.request_id == "r"
    assert next(iter(changes)) in rejected.message


def test_an_unknown_control_message_is_answered() -> None:
    """Else its sender would wait for ever."""
    frame = msgspec.msgpack.encode({"type": "Control", "serial": 3, "message": {"type": "MakeTea"}})
    reply = decode_command(frame)
    assert isinstance(reply, ControlReply) and reply.serial == 3
    assert "unknown control message" in reply.error and "MakeTea" in reply.error


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "Add", "request": {"request_id": 5}}),
        encode(Ended("because")),
        encode(Finish("r", 1, "whatever", 4)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_anything_else_is_ignored_and_logged(frame: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert decode_command(frame) is None
    assert "ignored" in caplog.text


def test_a_command_is_no_event() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(encode(Abort("r")))
