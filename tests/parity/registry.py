"""The lists of cases. A module with a list `CASES` is one line here."""

from importlib import import_module

from tests.parity.cases import Case

MODULES = ("tests.parity.dual", "tests.parity.vision_only", "tests.parity.variable")


def all_cases() -> dict[str, Case]:
    """Every case by its name, in the order of the lists."""
    found: dict[str, Case] = {}
    for module in MODULES:
        for case in import_module(module).CASES:
            assert case.name not in found, f"two cases are called {case.name}"
            found[case.name] = case
    return found
