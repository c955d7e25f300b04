"""Energy: meters that a kernel and a driver have, in a folder and a library made here, and rows of the ledger."""

import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend.tenants import books
from penstock.frontend.tenants.energy import EnergyMeter, MeterSource, nvml, rapl
from penstock.frontend.tenants.ledger import FIELDS, open_ledger, rows_of
from penstock.kernels.native.build import compiler
from penstock.messages import ComputeUsage
from tests.frontend.tenants.conftest import TenantSite
from tests.frontend.tenants.test_ledger import rows

DRIVER = """
static unsigned long long calls = 0;
extern "C" int nvmlInit_v2() { return 0; }
extern "C" int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
extern "C" int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = (void*)(1ull << 40 | index);
  return 0;
}
extern "C" int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
  if ((unsigned long long)handle >> 40 != 1) return 2;
  *millijoules = 5000000000ull + 1500 * ((unsigned long long)handle & 1) + 1000 * ++calls;
  return FAILS_AFTER && calls > FAILS_AFTER ? 999 : 0;
}
"""


def package(folder: Path, number: int, name: str, microjoules: int) -> Path:
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir(exist_ok=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "max_energy_range_uj").write_text("10000000\n")
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    return zone / "energy_uj"


def test_packages_are_added_and_a_counter_may_begin_anew(tmp_path: Path) -> None:
    first = package(tmp_path, 0, "package-0", 9_000_000)
    package(tmp_path, 1, "package-1", 2_000_000)
    package(tmp_path, 2, "psys", 7_000_000)  # has the packages in it
    (tmp_path / "dtpm").mkdir()  # a zone without a counter
    source = rapl(tmp_path)
    assert source is not None and source.name == "rapl"
    assert source.joules() == 11.0
    first.write_text("500000\n")
    assert source.joules() == 12.5
    first.write_text("600000\n")
    assert source.joules() == pytest.approx(12.6)


def test_a_machine_without_a_meter(tmp_path: Path) -> None:
    assert rapl(tmp_path) is None
    assert nvml("libnot-there.so.1") is None


def test_a_counter_that_may_not_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = package(tmp_path, 0, "package-0", 1)
    counter.unlink()
    counter.mkdir()  # for root, too, it cannot be read
    assert rapl(tmp_path) is None
    assert "no measured energy" in caplog.text and "energy_uj" in caplog.text


@pytest.mark.parametrize(("fails_after", "is_there"), [(0, True), (1, False)])
def test_the_gpus_of_a_driver(tmp_path: Path, fails_after: int, is_there: bool) -> None:
    (tmp_path / "driver.cpp").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", f"-DFAILS_AFTER={fails_after}", "-o", str(library)]
    subprocess.run([*compiler(), *flags, str(tmp_path / "driver.cpp")], check=True)
    source = nvml(str(library))
    assert (source is not None) == is_there
    if source is not None:  # opening it has read both GPUs
        assert (source.name, source.joules()) == ("nvml", 10_000_000 + 1.5 + 3 + 4)


def test_power_is_the_mean_over_a_request() -> None:
    now, used = 0.0, 0.0

    def passes(seconds: float, watts: float) -> None:
        nonlocal now, used
        now, used = now + seconds, used + seconds * watts
        meter.sample()

    meter = EnergyMeter(MeterSource("rapl", lambda: used), clock=lambda: now)
    assert meter.watts(0.0) == 0.0  # nothing is known yet
    passes(1.0, 100.0)
    passes(1.0, 200.0)
    passes(2.0, 50.0)
    assert meter.watts(0.0) == 100.0
    assert meter.watts(1.5) == 100.0  # from the sample at 1.0: 300 J in 3 s
    assert meter.watts(3.9) == 50.0
    assert meter.watts(4.5) == 50.0  # began after the last sample
    for _ in range(20_000):
        passes(1.0, 70.0)
    assert meter.watts(0.0) == 70.0  # the oldest are forgotten


async def test_rows_have_joules(tenant_site: Callable[..., TenantSite], monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0.0
    meter = EnergyMeter(MeterSource("rapl", lambda: used), clock=lambda: 1e9 + used / 80)
    used = 800.0  # 80 W for ten seconds
    meter.sample()
    seen = []
    for found, watts in ((None, 0), (None, 300), (meter, 300)):
        monkeypatch.setattr(books, "open_meter", lambda found=found: found)
        site = tenant_site({"a": {"keys": {"ci": {}}}}, watts=watts)
        site.site.engine.usage = ComputeUsage(computed=3, step_seconds=0.25)
        await site.ask("a/ci")
        await site.close()
        row = rows(site)[-1]
        assert row["step_ms"] == 250.0
        seen.append((row["energy"], row["joules"]))
    assert seen == [("none", 0.0), ("estimate", 75.0), ("rapl", pytest.approx(20.0))]


def test_an_older_ledger_gets_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    open_ledger(path).close()
    older = sqlite3.connect(path)
    for name in ("joules", "energy"):
        older.execute(f"ALTER TABLE requests DROP COLUMN {name}")
    older.execute("INSERT INTO requests (id, began, tenant) VALUES ('x', 5.0, 'a')")
    older.commit()
    older.close()
    (row,) = rows_of(open_ledger(path), 0.0, 10.0, {})
    named = dict(zip(FIELDS, row, strict=True))
    assert (named["id"], named["joules"], named["energy"]) == ("x", 0.0, "none")
