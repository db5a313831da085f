"""What the command says of what it is given wrongly: one line that names it and the next step, and no traceback."""

import re

import pytest
from typer.testing import CliRunner

from deployments.cli.app import app
from deployments.local import LocalFleet
from deployments.settings import LocalSettings, ServeSettings
from encoder.client.errors import service_error
from encoder.errors import InvalidInput
from encoder.settings import parse_engine_settings


def refusal(*arguments: str) -> str:
    """What stands on the screen, without frames and line ends."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code != 0 and not isinstance(result.exception, AssertionError)
    told = result.output + (str(result.exception) if isinstance(result.exception, InvalidInput) else "")
    assert "Traceback" not in told
    return re.sub(r"[\s│]+", " ", told)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "--address", "http://127.0.0.1:50051"], "pass host:port, such as 127.0.0.1:50051"),
        (["models", "--address", "localhost"], "without a port: pass host:port, such as localhost:50051"),
        (["encode", "x.jpg", "--out", "v.npy", "--dimensions", "-1"], "'--dimensions'"),
        (["serve", "--port", "99999"], "'--port'"),
        (["serve", "--http-port", "-1"], "'--http-port'"),
        (["check", "--tower", "text", "--quantization", "int8"], "--quantization int8 is for pictures: check the"),
        (["check", "--dtype", "float8"], "'bfloat16' or 'float16', not 'float8'"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


def test_an_address_of_another_machine_is_no_taken_port() -> None:
    settings = LocalSettings(serve=ServeSettings(host="192.0.2.77", grpc_port=0, http_port=0), router_port=0)
    with pytest.raises(InvalidInput, match=r"192\.0\.2\.77 is no address of this machine: listen on 127\.0\.0\.1"):
        LocalFleet(settings).start()


def test_a_bucket_that_is_wrong_is_told_once() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_engine_settings({"buckets": [0]})
    assert str(refused.value) == "engine settings: buckets.0: Input should be greater than 0, not 0"


def test_a_name_that_is_not_known_is_no_matter_of_the_log() -> None:
    error = service_error("NOT_FOUND", "", address="127.0.0.1:1", timeout=1.0, has_token=False)
    assert "127.0.0.1:1 has nothing of that name: leave the name out" in str(error)
