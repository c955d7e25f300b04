"""Adds up the seconds of steps."""

from penstock.messages import Clock, StepTiming


class StepMeter:
    """Attributes every second of the loop to the step it leads to, except those spent asleep.

    So (step_seconds - forward_seconds - sample_seconds) / steps is the host's work per step: commands, scheduling,
    inputs, messages.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.mark = clock()  # when the last step's result came
        self._step = self._forward = self._sample = 0.0

    def resume(self) -> None:
        """Leave out the time since the last step, in which the loop was asleep."""
        self.mark = self._clock()

    def step(self, timing: StepTiming, now: float) -> None:
        """Add a step whose result has come."""
        self._step += now - self.mark
        self.mark = now
        self._forward += timing.forward
        self._sample += timing.sample

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of all steps so far, of their forward passes and of their sampling."""
        return self._step, self._forward, self._sample
