"""The subcommands and their options; what they do is in the modules beside this one."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="One embedding space from a mixed fleet: images or texts in, vectors out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Proxy(StrEnum):
    """How Ray Serve takes requests in."""

    HAPROXY = "haproxy"
    STOCK = "stock"


class Dtype(StrEnum):
    """How vectors are packed."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    BINARY = "binary"


class Device(StrEnum):
    """Kinds of device."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    NPU = "npu"
    XPU = "xpu"
    MUSA = "musa"


def checked_address(value: str) -> str:
    """Raises BadParameter for what is no host:port."""
    from encoder.client.connection import check_address

    try:
        check_address(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


Address = Annotated[
    str, typer.Option(help="host:port of the router.", envvar="VITFLEET_ADDRESS", callback=checked_address)
]
ModelName = Annotated[str, typer.Option(help="Model to ask for; empty: the one the service has.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"


@app.callback()
def root() -> None:
    """One embedding space from a mixed fleet: images or texts in, vectors out."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="A Serve config; default: the demo model on this CPU.")] = None,
    model: Annotated[
        str | None, typer.Option(help="'demo', a folder, or a hub name; served by every pool of the config.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a hub model.")] = None,
    host: Annotated[str, typer.Option(help="Address the router listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the router; 0: a free one.")] = 50051,
    serve_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port of Ray Serve; 0: a free one.")] = 0,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port of Ray Serve; 0: a free one.")] = 0,
    proxy: Annotated[Proxy, typer.Option(help="How Ray Serve takes requests in.")] = Proxy.HAPROXY,
    attention_backend: Annotated[
        str | None, typer.Option(help="Force an attention backend; empty: the platform's best.")
    ] = None,
    strict_backend: Annotated[
        bool, typer.Option("--strict-backend", help="A call that the backend does not take is an error.")
    ] = False,
) -> None:
    """Serve a model on this machine until Ctrl-C."""
    from deployments.cli.serving import run_serve

    engine = {
        "model": model,
        "revision": revision,
        "attention_backend": attention_backend,
        "strict_backend": strict_backend or None,
    }
    run_serve(
        config=config,
        engine={key: value for key, value in engine.items() if value is not None},
        host=host,
        port=port,
        serve_port=serve_port,
        http_port=http_port,
        proxy=proxy.value,
    )


@app.command()
def demo(proxy: Annotated[Proxy, typer.Option(help="How Ray Serve takes requests in.")] = Proxy.HAPROXY) -> None:
    """Start the service, classify the sample pictures, show what came out, and stop."""
    from deployments.cli.serving import run_demo

    run_demo(proxy=proxy.value)


@app.command()
def encode(
    paths: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write: .npy or .parquet.")],
    dtype: Annotated[Dtype, typer.Option(help="How vectors are packed.")] = Dtype.FLOAT32,
    dimensions: Annotated[int, typer.Option(min=0, help="Keep the first so many; 0: all.")] = 0,
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
    pool: Annotated[str, typer.Option(help="Serve from this pool and no other.")] = "",
) -> None:
    """Encode pictures into a file of vectors; bad ones are listed, and the good ones are not lost."""
    from deployments.cli.pictures import run_encode

    run_encode(paths, out, dtype=dtype.value, dimensions=dimensions, address=address, model=model, pool=pool)


@app.command()
def classify(
    picture: Annotated[Path, typer.Argument(help="A picture.", show_default=False)],
    labels: Annotated[
        list[str], typer.Option("--labels", "-l", help="Labels to choose from: --labels A --labels B, or --labels A B.")
    ],
    more_labels: Annotated[list[str] | None, typer.Argument(help="More labels.", show_default=False)] = None,
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
) -> None:
    """Say which of some labels fits a picture best."""
    from deployments.cli.zero_shot import run_classify

    run_classify(picture, [*labels, *(more_labels or [])], address=address, model=model)


@app.command()
def report(
    address: Address = DEFAULT_ADDRESS,
    pool: Annotated[str, typer.Option(help="Only this pool.")] = "",
    json: AsJson = False,
) -> None:
    """Show for each replica the backend in force, why, what was rejected, and what was proven."""
    from deployments.cli.show import run_report

    run_report(address=address, pool=pool, as_json=json)


@app.command()
def models(address: Address = DEFAULT_ADDRESS, json: AsJson = False) -> None:
    """List the models that are served."""
    from deployments.cli.show import run_models

    run_models(address=address, as_json=json)


@app.command()
def check(
    model: Annotated[str, typer.Option(help="'demo', a folder, or a hub name.")] = "demo",
    device: Annotated[Device, typer.Option(help="Kind of device.")] = Device.CPU,
    tower: Annotated[str, typer.Option(help="vision, text or both.")] = "both",
    attention_backend: Annotated[
        str | None, typer.Option(help="Force an attention backend; empty: the platform's best.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    runner: Annotated[str, typer.Option(help="auto, eager, openvino, inductor, cuda, cuda-inductor or npu.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none or int8 (the vision tower on OpenVINO).")] = "none",
    calibration: Annotated[
        Path | None, typer.Option(help="Folder of pictures that int8 is calibrated on; empty: drawn ones.")
    ] = None,
    preprocess: Annotated[str, typer.Option(help="torch, pil or reduced.")] = "torch",
    buckets: Annotated[str, typer.Option(help="Batch sizes to capture, as 1,4,8; empty: those of a replica.")] = "",
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a hub model.")] = None,
    strict_backend: Annotated[
        bool, typer.Option("--strict-backend", help="A call that the backend does not take is an error.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Resolve, capture and self-check a model on this machine, with no service; exit code 0 when the proof holds."""
    from deployments.cli.check import run_check

    engine = {
        "model": model,
        "device": device.value,
        "attention_backend": attention_backend,
        "dtype": dtype,
        "runner": runner,
        "revision": revision,
        "strict_backend": strict_backend,
        "preprocess": preprocess,
    }
    for_pictures = {"quantization": quantization, "calibration": calibration}
    run_check(engine, for_pictures, tower=tower, buckets=buckets, as_json=json)


@app.command(name="add-check")
def add_check(
    path: Annotated[str, typer.Argument(help="A checkpoint's folder, or 'demo'.", show_default=False)],
    json: AsJson = False,
) -> None:
    """Say what an unknown checkpoint is, what would be served of it and what is missing; reads no weights' values."""
    from deployments.cli.firstaid import run_add_check

    run_add_check(path, as_json=json)
