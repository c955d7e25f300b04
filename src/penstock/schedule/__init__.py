"""The scheduler: request state, queue order, KV blocks, the prefix cache. Pure: events in, plans out."""

from penstock.schedule.config import SchedulerConfig
from penstock.schedule.log import Event, EventFile, EventLog, read_events
from penstock.schedule.replay import ReplayMismatch, replay
from penstock.schedule.scheduler import Scheduler

__all__ = [
    "Event",
    "EventFile",
    "EventLog",
    "ReplayMismatch",
    "Scheduler",
    "SchedulerConfig",
    "read_events",
    "replay",
]
