"""The wire contract: generated code is what the .proto gives today, and the .proto keeps to its conventions."""

import re
from pathlib import Path

import google.rpc.status_pb2
import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto/encoder/v1/encoder.proto"
GENERATED = ("encoder_pb2.py", "encoder_pb2.pyi", "encoder_pb2_grpc.py")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    includes = [
        ROOT / "proto",
        Path(google.rpc.status_pb2.__file__).parents[2],
        Path(protoc.__file__).parent / "_proto",
    ]
    arguments = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    code = protoc.main(["protoc", *(f"-I{path}" for path in includes), *arguments, "encoder/v1/encoder.proto"])
    assert code == 0
    return out / "encoder/v1"


@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_has_not_drifted(fresh: Path, name: str) -> None:
    assert (ROOT / "encoder/v1" / name).read_text() == (fresh / name).read_text(), "run `make proto`"


def test_buf_standard_conventions() -> None:
    text = PROTO.read_text()
    assert "package encoder.v1;" in text
    for name in re.findall(r"^service (\w+)", text, re.M):
        assert name.endswith("Service")
    calls = re.findall(r"rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", text)
    assert [call[0] for call in calls] == [
        "EncodeImages", "EncodeText", "EncodeStream", "ListModels", "GetModel", "GetBackendReport",
    ]  # fmt: skip
    for name, request, response in calls:
        assert (request, response) == (f"{name}Request", f"{name}Response")
    for name, body in re.findall(r"^enum (\w+) \{(.*?)^\}", text, re.M | re.S):
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
        values = re.findall(r"^\s+([A-Z0-9_]+) = (\d+);", body, re.M)
        assert values[0] == (f"{prefix}_UNSPECIFIED", "0")
        assert all(value.startswith(f"{prefix}_") for value, _ in values)
    assert all(
        re.fullmatch(r"[a-z][a-z0-9_]*", field)
        for field in re.findall(r"^\s+(?:optional |repeated )?[\w.]+ (\w+) = \d+;", text, re.M)
    )
