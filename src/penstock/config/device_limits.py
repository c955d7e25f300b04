"""Settings that only one kind of device has, and their limits there."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.config.hardware import Hardware, has_capability
from penstock.config.sources import ConfigError, flag

FP8_CAPABILITY = (8, 9)  # the least whose tensor cores multiply fp8


class _DeviceSetting(NamedTuple):
    """A value that one kind of device takes."""

    setting: str
    values: tuple[Any, ...]  # none: any
    device: str
    why: str
    remedy: str


_DEVICE_SETTINGS = (
    _DeviceSetting(
        "gpu_memory_utilization", (), "cuda", "is of a GPU's memory", "leave it out, or set --kv-cache-memory"
    ),
    _DeviceSetting("enforce_eager", (True,), "cuda", "is about CUDA graphs", "leave it out"),
    _DeviceSetting("attention_backend", ("triton", "flashinfer"), "cuda", "is of a GPU's kernels", "leave it out"),
    _DeviceSetting("quantization", ("fp8",), "cuda", "takes a GPU's tensor cores", "set --quantization int8"),
    _DeviceSetting("kv_cache_dtype", ("fp8",), "cuda", "is a GPU's", "set --kv-cache-dtype int8"),
    _DeviceSetting("kv_cache_dtype", ("int8",), "cpu", "is a CPU's", "set --kv-cache-dtype fp8"),
    _DeviceSetting("threads", (), "cpu", "is of threads that compute, and a GPU does that", "leave it out"),
)


def check_device_settings(values: Mapping[str, Any], sources: Mapping[str, str], hardware: Hardware) -> None:
    """Raise ConfigError where a setting that was given is not one of the hardware's kind of device."""
    device, what = hardware.device, _name(hardware)
    asked = values.get("device", device)
    if asked != device:
        raise ConfigError(
            f"--device ({sources['device']}) is {asked}, but this is for {what}; leave it out, or set --device {device}"
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
                f"{flag(setting)} ({sources[setting]}) is fp8, which takes a compute capability of "
                f"{'.'.join(map(str, FP8_CAPABILITY))} (L4, L40S, H100 or later), and {_name(hardware)} has "
                f"{hardware.capability}; {remedy}"
            )


def check_flashinfer_settings(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise ConfigError where FlashInfer is to compute what it does not. `values` has every setting."""
    if values["attention_backend"] != "flashinfer":
        return
    for setting, value, why, remedy in (
        ("deterministic", True, "its results depend on what else is in the batch", "leave one of the two out"),
        ("kv_cache_dtype", "fp8", "it reads no pages with a scale for each token and head", "leave one of the two out"),
        ("dtype", "float32", "it computes in 16 bits", "set --dtype bfloat16, or --attention-backend triton"),
    ):
        if values[setting] == value:
            raise ConfigError(
                f"--attention-backend ({sources['attention_backend']}) is flashinfer, but {flag(setting)} "
                f"({sources[setting]}) is {value}: {why}; {remedy}"
            )


def _name(hardware: Hardware) -> str:
    return "a CPU" if hardware.device == "cpu" else hardware.name or "a GPU"
