"""EncoderService as the router serves it: raw bytes in and out, and one frame of checks around every call."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from deployments.router.calls import REQUEST_ID_METADATA, Call, open_call
from deployments.router.failures import RouterError
from deployments.router.forward import Forwarder
from deployments.router.gate import Gate
from deployments.router.logs import log_call, log_event
from deployments.router.metrics import Metrics
from deployments.router.pools import ENCODE_METHODS, SERVICE, PoolSet
from deployments.router.quarantine import Quarantine
from deployments.router.report import Reporter
from deployments.router.settings import RouterSettings
from deployments.router.stream import StreamRelay
from deployments.router.tokens.guard import Guard
from deployments.router.tokens.quota import TokenRefusal
from encoder.errors import without_traceback

logger = logging.getLogger(__name__)

Serve = Callable[[bytes, Call], Awaitable[bytes]]


class RouterService:
    """The handlers of EncoderService. Nothing is deserialised by gRPC: the payload is passed on as it came."""

    def __init__(
        self,
        pools: PoolSet,
        quarantine: Quarantine,
        guard: Guard,
        gate: Gate,
        settings: RouterSettings,
        metrics: Metrics,
    ) -> None:
        self._guard = guard
        self._gate = gate
        self._settings = settings
        self._metrics = metrics
        forwarder = Forwarder(pools, quarantine, settings, metrics)
        self._streams = StreamRelay(forwarder, gate, settings, metrics)
        reporter = Reporter(pools, quarantine, settings)
        self._unary: dict[str, Serve] = {
            ENCODE_METHODS["vision"]: partial(forwarder.forward, "vision"),
            ENCODE_METHODS["text"]: partial(forwarder.forward, "text"),
            "ListModels": reporter.list_models,
            "GetModel": reporter.get_model,
            "GetBackendReport": reporter.get_backend_report,
        }

    def handler(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        handlers: dict[str, grpc.RpcMethodHandler] = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._serve_unary, name, serve))
            for name, serve in self._unary.items()
        }
        handlers["EncodeStream"] = grpc.stream_stream_rpc_method_handler(self._serve_stream)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _serve_unary(self, method: str, serve: Serve, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        call = open_call(method, context, self._settings.deadline)
        call.bytes_in = len(request)
        code = grpc.StatusCode.CANCELLED.name  # what it was when neither an answer nor an error is reached
        try:
            with self._gate.enter(), self._metrics.under_way(method):
                call.quota = self._guard.identify(context.invocation_metadata() or ())
                with call.quota.call():
                    response = await serve(request, call)
            code, call.bytes_out = grpc.StatusCode.OK.name, len(response)
            context.set_trailing_metadata(_trailers(call))
            return response
        except Exception as error:
            failure = without_traceback(self._failure(error, call))
            code = failure.code.name
            del request  # gRPC keeps this frame, by the error that aborts, until Python's collector comes by
            await context.abort(failure.code, failure.message, (*_trailers(call), *failure.trailers()))
        finally:
            self._finish(call, code)

    async def _serve_stream(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        """`requests` is not used: the relay reads from the context, and only when it has room."""
        call = open_call("EncodeStream", context, self._settings.deadline, endless=True)
        code = grpc.StatusCode.CANCELLED.name
        try:
            with self._gate.enter(), self._metrics.under_way(call.method):
                call.quota = self._guard.identify(context.invocation_metadata() or ())
                with call.quota.stream():
                    await self._relay(context, call)
            code = grpc.StatusCode.OK.name
            context.set_trailing_metadata(_trailers(call))
        except Exception as error:
            failure = without_traceback(self._failure(error, call))
            code = failure.code.name
            await context.abort(failure.code, failure.message, (*_trailers(call), *failure.trailers()))
        finally:
            self._finish(call, code)

    async def _relay(self, context: grpc.aio.ServicerContext, call: Call) -> None:
        # A stream may last long: its id is told at once, and not only at its end.
        await context.send_initial_metadata(_trailers(call))
        await self._streams.relay(context, call)

    def refused(self, method: str, context: grpc.aio.ServicerContext, refusal: TokenRefusal) -> None:
        """Notes a call that was refused before it came here; `method` is a path, of any service."""
        known = method.removeprefix(f"/{SERVICE}/")
        known = known if known in self._unary or known == "EncodeStream" else "other"
        call = open_call(known, context, self._settings.deadline)
        self._metrics.refusal(refusal.token, refusal.reason)
        self._finish(call, refusal.code.name)

    def _failure(self, error: Exception, call: Call) -> RouterError:
        if isinstance(error, TokenRefusal):
            self._metrics.refusal(error.token, error.reason)
        if isinstance(error, RouterError):
            return error
        fields = {"method": call.method, "request_id": call.request_id}
        log_event(logger, logging.ERROR, "call_failed", fields, trace=True)
        return RouterError(
            grpc.StatusCode.INTERNAL, f"the router failed: its log names the cause under request id {call.request_id}"
        )

    def _finish(self, call: Call, code: str) -> None:
        self._metrics.call(call, code)
        log_call(call, code)


def _trailers(call: Call) -> tuple[tuple[str, str], ...]:
    return ((REQUEST_ID_METADATA, call.request_id),)
