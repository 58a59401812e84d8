"""python tests/tally.py <preset> <JUnit file>: prints how many tests passed and how many failed.

A test of ctest that ran suites of GoogleTest counts by its cases, which they leave in
build/<preset>/tests/results. If it failed and no case did, it died, and counts as a failure itself.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree


def verdicts(path: Path) -> tuple[int, int]:
    passed = failed = 0
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is None and case.get("status") not in ("notrun", "disabled"):
            passed += 1
    return passed, failed


def main() -> None:
    preset, junit = sys.argv[1], Path(sys.argv[2])
    passed, failed = verdicts(junit)
    for case in ElementTree.parse(junit).iter("testcase"):
        cases = Path("build", preset, "tests", "results", f"{case.get('name')}.xml")
        if not cases.exists():
            continue
        more_passed, more_failed = verdicts(cases)
        if case.find("failure") is None:
            passed -= 1
        elif more_failed:
            failed -= 1
        passed, failed = passed + more_passed, failed + more_failed
    print(passed, failed)


main()
