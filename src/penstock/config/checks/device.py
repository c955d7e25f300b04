"""Checks of settings that only one kind of device supports."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.config.machine.hardware import Hardware, has_capability
from penstock.config.sources import ConfigError
from penstock.config.wrong_setting import flag

FP8_CAPABILITY = (8, 9)  # the least whose tensor cores multiply fp8


class _DeviceSetting(NamedTuple):
    """A setting, or some of its values, that only one kind of device supports."""

    setting: str
    values: tuple[Any, ...]  # (): all
    device: str
    why: str
    remedy: str


_DEVICE_SETTINGS = (
    _DeviceSetting(
        "gpu_memory_utilization", (), "cuda", "is a share of a GPU's memory", "leave it out, or set --kv-cache-memory"
    ),
    _DeviceSetting("enforce_eager", (True,), "cuda", "is about CUDA graphs", "leave it out"),
    _DeviceSetting("quantization", ("fp8",), "cuda", "needs a GPU's tensor cores", "set --quantization int8"),
    _DeviceSetting("kv_cache_dtype", ("fp8",), "cuda", "only a GPU supports", "set --kv-cache-dtype int8"),
    _DeviceSetting("kv_cache_dtype", ("int8",), "cpu", "only a CPU supports", "set --kv-cache-dtype fp8"),
    _DeviceSetting("watermark", ("green-list", "gumbel"), "cpu", "only a CPU's kernels have", "leave it out"),
    _DeviceSetting("threads", (), "cpu", "is the number of threads that compute", "leave it out"),
)


def check_device_settings(values: Mapping[str, Any], sources: Mapping[str, str], hardware: Hardware) -> None:
    """Raise ConfigError if a setting was given that the hardware's kind of device does not support."""
    device, what = hardware.device, _name(hardware)
    given = values.get("device", device)
    if given != device:
        raise ConfigError(
            f"--device ({sources['device']}) is {given}, but the hardware is {what}; leave it out, or set --device "
            f"{device}"
        )
    for only in _DEVICE_SETTINGS:
        value = values.get(only.setting)
        if value is None or device == only.device or (only.values and value not in only.values):
            continue
        raise ConfigError(
            f"{flag(only.setting)} ({sources[only.setting]}) is {value}, which {only.why}, but the device is {what}; "
            f"{only.remedy}"
        )
    if device == "cuda":
        _check_fp8(values, sources, hardware)


def _check_fp8(values: Mapping[str, Any], sources: Mapping[str, str], hardware: Hardware) -> None:
    if not hardware.capability or has_capability(hardware.capability, FP8_CAPABILITY):
        return
    for setting, remedy in (("quantization", "set --quantization int8"), ("kv_cache_dtype", "leave it out")):
        if values.get(setting) == "fp8":
            raise ConfigError(
                f"{flag(setting)} ({sources[setting]}) is fp8, which needs a compute capability of "
                f"{'.'.join(map(str, FP8_CAPABILITY))} (L4, L40S, H100 or later), and {_name(hardware)} has "
                f"{hardware.capability}; {remedy}"
            )


def _name(hardware: Hardware) -> str:
    return "a CPU" if hardware.device == "cpu" else hardware.name or "a GPU"
