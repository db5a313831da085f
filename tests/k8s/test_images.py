"""The Dockerfiles, read and not built: what goes into them, who runs in them, and what the router needs."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k8s.checks.render import kustomizations, render

ROOT = Path(__file__).parents[2]
DOCKERFILES = {path.suffix[1:]: path for path in sorted((ROOT / "docker").glob("Dockerfile.*"))}
POOLS = ["cann", "cpu", "cuda"]
each_image = pytest.mark.parametrize("name", DOCKERFILES)


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) in order; continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILES[name].read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def test_every_image_of_the_manifests_has_a_dockerfile():
    named = {
        image["image"].partition(":")[0]
        for name in ("mixed", "cpu")
        for image in containers(render(kustomizations()[name]))
        if image["image"].startswith("vitfleet/")
    }
    assert named == {"vitfleet/router", *(f"vitfleet/pool-{name}" for name in POOLS)}
    assert set(DOCKERFILES) == {"router", *POOLS}


def containers(value: object):
    if isinstance(value, dict):
        if "image" in value:
            yield value
        for inner in value.values():
            yield from containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


@each_image
def test_bases_are_pinned_and_there_are_two_stages(name):
    defaults = dict(text.split("=", 1) for word, text in instructions(name)[:2] if word == "ARG")
    bases = [text for word, text in instructions(name) if word == "FROM"]
    assert len(bases) == 2 and bases[0].endswith(" AS build")
    for base in bases:
        image = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], base.removesuffix(" AS build"))
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+", image)


@each_image
def test_it_runs_as_the_user_of_the_manifests(name):
    stages = [index for index, (word, _) in enumerate(instructions(name)) if word == "FROM"]
    last = instructions(name)[stages[-1] :]
    assert [text for word, text in last if word == "USER"] == ["10001:10001"]
    assert ("WORKDIR", "/tmp") in last and not [text for word, text in last if word == "RUN" and "pip" in text]


@each_image
def test_what_is_copied_is_there_and_not_ignored(name):
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for word, text in instructions(name):
        assert word != "ADD"
        if word == "COPY" and "--from=" not in text:
            for source in [part for part in text.split() if not part.startswith("--")][:-1]:
                assert (ROOT / source).exists() and source.split("/")[0] in kept


@each_image
def test_versions_come_from_the_lock(name):
    installs = [
        part for word, text in instructions(name) if word == "RUN" for part in re.findall(r"pip install [^&]*", text)
    ]
    assert installs
    for install in installs:
        assert "-c constraints.txt" in install or install.strip() == "pip install --no-deps ."


@pytest.mark.parametrize("name", POOLS)
def test_pools_have_what_kuberay_and_the_manifests_call(name):
    text = DOCKERFILES[name].read_text()
    for program in ("bash", "wget", "procps", "/usr/local/bin/ray", "/usr/local/bin/drain-node"):
        assert program in text
    assert (ROOT / "docker" / "drain-node.sh").stat().st_mode & 0o111


def test_the_pythons_of_one_cluster_agree():
    versions = {re.search(r"python:([\d.]+)-", DOCKERFILES[name].read_text())[1] for name in ("cpu", "cuda", "router")}
    assert versions == {"3.11.15"}
    assert "py3.11" in DOCKERFILES["cann"].read_text()


def test_the_routers_requirements_are_all_that_it_imports():
    code = (
        "import sys, json; old = set(sys.modules);"
        "import deployments.router.main, deployments.router.tokens.__main__;"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - old})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    owners = importlib.metadata.packages_distributions()
    allowed = closure(
        line for line in (ROOT / "docker" / "router-requirements.txt").read_text().splitlines() if line[:1] != "#"
    )
    # grpc looks for its tools, and does without them.
    imported = set(json.loads(done.stdout)) & owners.keys() - {"deployments", "encoder", "grpc_tools"}
    assert {"grpc", "pydantic", "yaml"} <= imported
    assert {name for name in imported if not {canonical(owner) for owner in owners[name]} & allowed} == set()
    assert not {"torch", "ray", "transformers"} & allowed


def closure(requirements) -> set[str]:
    """These distributions, and all that they need without extras, by canonical name."""
    waiting, found = [canonical(line) for line in requirements], set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            needs = importlib.metadata.requires(name) or []
            waiting += [canonical(need) for need in needs if "extra ==" not in need]
    return found


def canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()
