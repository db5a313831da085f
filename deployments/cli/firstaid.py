"""`vitfleet add-check`: first aid for a checkpoint that nobody has served yet."""

import dataclasses
import json

import typer
from rich.table import Table

from deployments.cli.show import console


def run_add_check(path: str, *, as_json: bool) -> None:
    """Shows every finding; exit code 0 only when every tower of the checkpoint would be served."""
    from encoder.models.firstaid import examine

    found = examine(path)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in found.findings]
        towers = [spec.tower for spec in found.towers]
        print(
            json.dumps({"name": found.name, "served": found.served, "towers": towers, "findings": findings}, indent=2)
        )
    else:
        table = Table("what", "good", "found", "next step", title=found.name)
        for finding in found.findings:
            table.add_row(finding.topic, "yes" if finding.good else "no", finding.told, finding.next_step)
        to = console()
        to.print(table)
        if found.served:
            to.print("would be served; `vitfleet check --model PATH` proves its vectors")
        else:
            to.print("would not be served as it is")
    raise typer.Exit(0 if found.served else 1)
