"""A logged scheduler, run again."""

from collections.abc import Iterable

from penstock.messages import StepPlan
from penstock.schedule.log import Aborted, Added, Applied, CacheReset, Event, Finished, Planned, Started
from penstock.schedule.policy import QueuePolicy, by_priority
from penstock.schedule.scheduler import Scheduler


def replay(events: Iterable[Event], policy: QueuePolicy = by_priority) -> list[StepPlan]:
    """The plans that a log's events give, the same every time. ValueError where the log does not begin at a start.

    The policy must be the one the log was written under.
    """
    plans: list[StepPlan] = []
    scheduler: Scheduler | None = None
    for event in events:
        if isinstance(event, Started):
            scheduler = Scheduler(event.config, event.capacity, policy=policy, incarnation=event.incarnation)
            continue
        if scheduler is None:
            raise ValueError(f"the log begins with {type(event).__name__}, not with the scheduler's start")
        match event:
            case Added(request, now):
                scheduler.add(request, now)
            case Finished(request_id, choice, reason, keep, now):
                scheduler.finish(request_id, choice, reason, keep, now)
            case Aborted(request_id, now):
                scheduler.abort(request_id, now)
            case Planned(now):
                plan = scheduler.plan(now)
                if plan is not None:
                    plans.append(plan)
            case Applied(result, now):
                scheduler.apply(result, now)
            case CacheReset():
                scheduler.reset_prefix_cache()
    return plans
