"""Hardware by its name."""

import pytest

from penstock.config.machine.devices import NAMED, Devices, parse_devices, parse_speed, this_machine, with_link
from tests.config.models import GIB, machine


@pytest.mark.parametrize("name", NAMED)
def test_named_devices_have_memory_and_speeds(name: str) -> None:
    one, eight = parse_devices(name), parse_devices(f"8x{name.lower()}")
    assert (one.count, eight.count) == (1, 8)
    assert (one.memory, one.bandwidth, one.link) == (eight.memory, eight.bandwidth, eight.link)
    assert 20 * 10**9 < one.memory < 10**12 and one.link < one.bandwidth < 10**13
    assert one.device == eight.device == "cuda"
    assert float(one.capability) >= 8.0


def test_devices_by_their_figures() -> None:
    devices = parse_devices("4x64GiB:200GB/s:3GB/s")
    assert devices == Devices("4x64GiB:200GB/s:3GB/s", 4, 64 * GIB, 200 * 10**9, 3 * 10**9)
    assert parse_devices("4x64GiB:200GB/s:3GB/s", "cuda").device == "cuda"
    assert str(parse_devices("8xH100")) == "8xH100: 80.00 GiB, 3350 GB/s, link 450 GB/s each"


def test_a_device_has_its_memory_to_itself_and_this_machine_shares_its() -> None:
    here = machine(16)
    alone, shared = parse_devices("2xL4").machine(here), this_machine(here).machine(here)
    assert (alone.memory_available, alone.shared, alone.cores) == (24 * 10**9, False, 4)
    assert (alone.device, alone.capability, shared.device) == ("cuda", "8.9", "cpu")
    assert (shared.memory_available, shared.shared) == (16 * GIB, True)
    assert this_machine(here).count == 4


def test_a_link_that_is_given_counts() -> None:
    devices = parse_devices("8xH100")
    assert with_link(devices, None) == devices
    assert with_link(devices, "25GB/s").link == 25 * 10**9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xFoo", "'8xFoo' is not known: name A100, H100"),
        ("", "is not known"),
        ("64GiB:200GB/s", "4x64GiB:200GB/s:3GB/s"),
        ("0xH100", "0 devices: name 1 to 4096"),
        ("99999xH100", "99999 devices: name 1 to 4096"),
        ("2xlots:200GB/s:3GB/s", "'lots' is not an amount of memory"),
        ("2x64GiB:fast:3GB/s", "'fast' is no speed; write for example 25GB/s"),
        ("2x64GiB:200GB/s:0", "'0' is no speed"),
    ],
)
def test_what_is_no_hardware_is_refused_with_what_is(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_devices(text)
    assert words in str(caught.value)


def test_speeds() -> None:
    assert parse_speed("--link", " 25GB/s ") == parse_speed("--link", "25GB") == 25 * 10**9
