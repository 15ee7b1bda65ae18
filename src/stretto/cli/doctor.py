"""stretto doctor: check the environment."""

from typing import Annotated

from stretto.cli.output import FLAG, print_json


def doctor(*, json: Annotated[bool, FLAG] = False) -> int:
    """Check what Stretto needs on this machine; exit with 1 if something that it cannot do without is missing.

    Parameters
    ----------
    json
        Print one JSON object on stdout, nothing else.
    """
    from stretto.doctor import examine

    findings = examine()
    broken = [finding for finding in findings if finding.state == "broken"]
    if json:
        print_json({"ok": not broken, "checks": [finding.to_json() for finding in findings]})
    else:
        marks = {"good": "ok     ", "missing": "absent ", "broken": "BROKEN "}
        for finding in findings:
            print(f"{marks[finding.state]} {finding.name:<14} {finding.detail}")
        print("everything Stretto needs is here" if not broken else "what is marked BROKEN must be mended first")
    return 1 if broken else 0
