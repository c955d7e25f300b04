"""A logged scheduler, run again."""

from collections.abc import Iterable

from penstock.messages import StepPlan
from penstock.schedule.log import (
    Aborted,
    Added,
    Applied,
    CacheReset,
    Dropped,
    Event,
    Finished,
    Imported,
    Lent,
    Planned,
    Reserved,
    Resized,
    Returned,
    Started,
    StartedOver,
    StepsLimited,
    Submitted,
    plan_digest,
)
from penstock.schedule.scheduler import Scheduler


class ReplayMismatch(ValueError):
    """The log's events give another plan than the log says."""


def replay(events: Iterable[Event]) -> list[StepPlan]:
    """Return the plans that a log's events give.

    Raises ReplayMismatch for the first plan that differs, ValueError for a log that does not begin at a start.
    """
    plans: list[StepPlan] = []
    scheduler: Scheduler | None = None
    unconfirmed: StepPlan | None = None  # made by the last event, and the log has yet to name it
    for event in events:
        if isinstance(event, Started):
            scheduler = Scheduler(event.config, event.capacity, incarnation=event.incarnation)
            continue
        if scheduler is None:
            raise ValueError(f"the log begins with {type(event).__name__}, not with the scheduler's start")
        if unconfirmed is not None or isinstance(event, Submitted):
            _compare(unconfirmed, event)
            unconfirmed = None
        match event:
            case Planned(now):
                unconfirmed = scheduler.plan(now)
                if unconfirmed is not None:
                    plans.append(unconfirmed)
            case Applied(result, now):
                try:
                    scheduler.apply(result, now)
                except ValueError as error:
                    raise ReplayMismatch(f"the result of plan {result.plan_id} answers no plan: {error}") from error
            case Added(request, now):
                scheduler.add(request, now)
            case Finished(request_id, choice, reason, keep, now):
                scheduler.finish(request_id, choice, reason, keep, now)
            case Aborted(request_id, now):
                scheduler.abort(request_id, now)
            case Dropped(now):
                scheduler.drop_late(now)
            case StartedOver(error, now):
                scheduler.start_over(error, now)
            case CacheReset():
                scheduler.reset_prefix_cache()
            case Resized(limits):
                scheduler.resize(limits)
            case StepsLimited(seconds):
                scheduler.limit_steps(seconds)
            case Lent(keys):
                scheduler.leases.lend(keys)
            case Reserved():
                scheduler.leases.reserve()
            case Imported(block, key):
                scheduler.leases.publish(block, key)
            case Returned(blocks):
                scheduler.leases.give_back(blocks)
    return plans


def _compare(plan: StepPlan | None, event: Event) -> None:
    """Raise ReplayMismatch when `event` does not say that `plan` was submitted."""
    if not isinstance(event, Submitted):
        number = "none" if plan is None else plan.plan_id
        raise ReplayMismatch(f"plan {number} was made, and the log goes on with {type(event).__name__}")
    if plan is None:
        raise ReplayMismatch(f"the log has plan {event.plan_id}, and nothing was planned")
    if (plan.plan_id, plan_digest(plan)) != (event.plan_id, event.digest):
        raise ReplayMismatch(f"plan {event.plan_id} differs from the log's: {plan}")
