"""Lets a model of the server write a summary."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Protocol, cast

from msgspec.structs import replace

from penstock.frontend.answer import Codec
from penstock.frontend.call import Call, ModelContext, RequestContext
from penstock.frontend.errors import APIError, as_api_error
from penstock.frontend.generation import PromptPart
from penstock.frontend.requests.context_policy import Summary
from penstock.frontend.requests.deadlines import deadlines
from penstock.frontend.requests.pooling import check_generates
from penstock.frontend.requests.reply import ReplyReader, read_parts

MOST_SECONDS = 30.0  # that a summary may take
_GATHERED = 32  # tokens for which the task is woken

_log = logging.getLogger("penstock.frontend")


class PreparedCall(Protocol):
    """See PreparedChat."""

    @property
    def part(self) -> PromptPart: ...
    @property
    def reader(self) -> ReplyReader | None: ...


async def write_summary(
    context: RequestContext, name: str, prepare: Callable[[ModelContext], Awaitable[PreparedCall]]
) -> Summary:
    """Returns what a model says to the chat that `prepare` returns for it: at most for MOST_SECONDS, or half of the
    time that the request has. The account of the request has a row of its own for it. An error is a failed summary,
    and cancels nothing."""
    due = min((each for each in deadlines(context, None, None) if each is not None), default=None)
    seconds = MOST_SECONDS if due is None else min((due - time.monotonic()) / 2, MOST_SECONDS)
    account = None if context.account is None else context.account.beside()
    code = ""
    try:
        async with asyncio.timeout(seconds):
            version = await context.models.enter_within(name, context.session_key, seconds)
            try:
                check_generates(version.model)
                limits = replace(context.limits, context_policy="error")
                own = replace(context, id=f"{context.id}-s", account=account, unread=None, limits=limits)
                summary = await _answer(own.on(version), prepare)
            finally:
                version.leave()
        code = summary.failure
    except Exception as error:
        late = isinstance(error, TimeoutError)
        failed = APIError(504, "", code="deadline_exceeded") if late else as_api_error(error, 1)
        code = failed.code or str(failed.status)
        known = failed.code != "internal_error"
        _log.warning("a chat gets no summary from %s: %s", name, error or code, exc_info=None if known else error)
        summary = Summary(failure=code)
    finally:
        if account is not None:
            account.leave(context.id, "summary", code)
    return summary


async def _answer(context: ModelContext, prepare: Callable[[ModelContext], Awaitable[PreparedCall]]) -> Summary:
    made = await prepare(context)
    call = Call(context, (made.part,), cast(Codec, None), False, "chat")
    generation, text = call.generation(time.monotonic(), context.id), ""
    async with aclosing(generation.updates(_GATHERED)) as updates:
        async for update in updates:
            parts = read_parts(made.reader, update, ended=update.finish_reason is not None)
            text += "".join(part.text for part in parts if part.kind == "content")
    used, text = generation.usage, text.strip()
    failure = "" if text else "empty_summary"
    return Summary(text, used.left_out.dropped, used.prompt_tokens, used.completion_tokens, failure)
