"""The tests of the PyTorch face can fail: an attach() with state by bucket fails all their rows."""

import re
import subprocess
import sys
from pathlib import Path

# Some tests of each row that compares debts: `pytest --naive` tries all.
ROWS = {
    "test_ddp.py": "test_laws and (static or unused or sync or frozen) "
    "or run_out_of_data and randk or several or at_run_time",
    "test_accelerator.py": "laws_on_a_device and ok_topk",
    "test_amp.py": "test_memory_is_unscaled",
    "test_checkpoints.py": "distributed_checkpoint_is_exact and topk-later",
    "test_two_levels.py": "laws_of_uneven_machines",
}


def test_state_by_bucket_fails_every_row() -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--naive", "-p", "no:cacheprovider", "-k"]
    words = " or ".join(f"({words})" for words in ROWS.values())
    files = [str(tests / file) for file in ROWS]
    ended = subprocess.run([*command, words, *files], capture_output=True, text=True, cwd=tests)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is None, ended.stdout
    failed = re.search(r"(\d+) failed", ended.stdout)
    assert failed is not None and int(failed[1]) >= 15, ended.stdout
