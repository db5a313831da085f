"""Settings: what is refused, and how it is told."""

import json
from pathlib import Path

import pytest

from deployments.router.settings import RouterSettings, load_settings, parse_settings, read_settings
from encoder.errors import InvalidInput

POOL = {"name": "vision-cpu", "address": "127.0.0.1:9000"}


def test_defaults() -> None:
    settings = parse_settings({"pools": [POOL]})
    assert (settings.host, settings.port) == ("127.0.0.1", 50051)
    assert settings.max_message_bytes == 64 * 1024 * 1024
    assert settings.reflection
    assert settings.metrics_port is None
    assert settings.log_level == "WARNING"
    assert settings.pools[0].towers == ()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "pools"),
        ({"pools": []}, "pools"),
        ({"pools": [POOL], "prot": 1}, "prot"),
        ({"pools": [POOL], "health": {"interval": 3}}, "health.interval"),
        ({"pools": [POOL | {"tower": "vision"}]}, "pools.0.tower"),
        ({"pools": [POOL | {"towers": ["audio"]}]}, "pools.0.towers.0"),
        ({"pools": [POOL | {"name": "Vision CPU"}]}, "pools.0.name"),
        ({"pools": [POOL | {"name": "encoder.v1.EncoderService"}]}, "pools.0.name"),
        ({"pools": [POOL, POOL]}, "vision-cpu"),
        ({"pools": [POOL], "port": 70000}, "port"),
        ({"pools": [POOL], "retry": {"attempts": 0}}, "retry.attempts"),
        ({"pools": [POOL], "log_level": "LOUD"}, "log_level"),
    ],
)
def test_refusals_name_the_key_in_one_line(values: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_settings(values)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_and_json_files(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "router.yaml", tmp_path / "router.json"
    yaml_file.write_text(
        "port: 6000\n"
        "pools:\n"
        "  - {name: vision-cpu, address: '127.0.0.1:9000', towers: [vision]}\n"
        "stream:\n"
        "  max_in_flight: 3\n"
    )
    settings = load_settings(yaml_file)
    assert (settings.port, settings.stream.max_in_flight, settings.pools[0].towers) == (6000, 3, ("vision",))
    json_file.write_text(settings.model_dump_json())
    assert load_settings(json_file) == settings


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\tx: 1"])
def test_text_that_is_no_mapping_is_refused_with_its_origin(text: str) -> None:
    with pytest.raises(InvalidInput, match="the origin"):
        read_settings(text, "the origin")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"missing\.yaml"):
        load_settings(tmp_path / "missing.yaml")


def test_settings_do_not_change() -> None:
    settings = parse_settings({"pools": [POOL]})
    assert RouterSettings.model_validate(json.loads(settings.model_dump_json())) == settings
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
