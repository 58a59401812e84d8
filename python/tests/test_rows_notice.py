"""The tests of the PyTorch face can fail: an attach() with state by bucket fails all their rows."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

# Some tests of each row that compares debts: `pytest --naive` tries all.
ROWS = {
    "test_ddp.py": "test_laws and (static or unused or sync or frozen) "
    "or run_out_of_data and randk or several or at_run_time",
    "test_accelerator.py": "laws_on_a_device and ok_topk",
    "test_amp.py": "test_memory_is_unscaled",
    "test_checkpoints.py": "distributed_checkpoint_is_exact and topk-later",
    "test_two_levels.py": "laws_of_uneven_machines",
}
# Nothing is owed there, so that it does not matter whose place it is kept at.
CONTROLS = {
    "test_attach.py": "test_density_one_is_plain_ddp and 2 and (dense or randk)",
    "test_amp.py": "test_amp and density_one_is_plain_ddp",
    "test_ddp.py": "tied_parameters",
}
# What a rank was at when it raised: a comparison, and no mistake of naive.py.
REASONS = (
    "torch.testing.assert_close(",  # the laws
    "assert torch.equal(",  # debts or means, bit for bit
    "assert second.digest() == whole.digest()",
    "assert eventful >= 4",  # debts that never arrive
)


def run_naively(folder: Path) -> dict[str, str]:
    """The tests that ran, with what was said of those that failed."""
    tests, report = Path(__file__).parent, folder / "report.xml"
    words = " or ".join(f"({words})" for words in [*ROWS.values(), *CONTROLS.values()])
    files = [str(tests / file) for file in dict.fromkeys([*ROWS, *CONTROLS])]
    command = [sys.executable, "-m", "pytest", "-q", "--naive", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, f"--junitxml={report}", "-k", words, *files],
        capture_output=True,
        text=True,
        cwd=tests,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return {
        f"{case.attrib['classname'].split('.')[-1]}.py {case.attrib['name']}": "".join(
            (part.text or "") for part in case if part.tag in ("failure", "error")
        )
        for case in ET.parse(report).getroot().iter("testcase")
    }


def is_control(test: str) -> bool:
    words = ("density_one_is_plain_ddp", "tied_parameters")
    return any(word in test for word in words)


@pytest.mark.long
def test_state_by_bucket_fails_every_row(tmp_path: Path) -> None:
    told = run_naively(tmp_path)
    controls = {test: failure for test, failure in told.items() if is_control(test)}
    rows = {test: failure for test, failure in told.items() if test not in controls}
    assert len(controls) >= 4
    assert not any(controls.values()), "naive.py itself is broken"
    assert len(rows) >= 15
    assert {test.split()[0] for test in rows} == ROWS.keys()
    for test, failure in rows.items():
        assert failure, f"{test} did not notice"
        assert "AssertionError" in failure, f"{test}: {failure}"
        assert any(reason in failure for reason in REASONS), f"{test}: {failure}"
