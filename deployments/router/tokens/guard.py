"""Who calls: the token of a call's metadata, checked before the call's message is read."""

from collections.abc import Awaitable, Callable, Iterable

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from deployments.router.tokens.keyring import Keyring
from deployments.router.tokens.quota import Quota, TokenRefusal

AUTHORIZATION = "authorization"
SCHEME = "bearer"
MAX_TOKEN_CHARACTERS = 1024
_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED

# Told of each refusal: the method's path, the call's context, and why.
Note = Callable[[str, grpc.aio.ServicerContext, TokenRefusal], None]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


class Guard:
    """Tells callers apart; without a keyring everybody may do everything."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._everybody = Quota()

    def identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Quota:
        """Raises TokenRefusal (UNAUTHENTICATED) for a token that is missing, no bearer token, or unknown."""
        if self._keyring is None:
            return self._everybody
        given = next((value for key, value in metadata if key == AUTHORIZATION), None)
        if given is None:
            raise _refusal("missing", "no token")
        scheme, _, token = given.partition(" ") if isinstance(given, str) else ("", "", "")
        token = token.strip()
        if scheme.lower() != SCHEME or not token or len(token) > MAX_TOKEN_CHARACTERS:
            raise _refusal("malformed", "the authorization is no bearer token")
        quota = self._keyring.find(token)
        if quota is None:
            raise _refusal("unknown", "the token is not known here")
        return quota


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls before their message is read: who has no token shall not make the router hold 64 MiB."""

    def __init__(self, guard: Guard, reflection_exempt: bool, note: Note) -> None:
        self._guard = guard
        self._note = note
        exempt = [health.SERVICE_NAME, *([reflection.SERVICE_NAME] if reflection_exempt else [])]
        self._exempt = tuple(f"/{service}/" for service in exempt)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        if not method.startswith(self._exempt):
            try:
                self._guard.identify(handler_call_details.invocation_metadata or ())
            except TokenRefusal as refusal:
                return self._aborting(method, refusal)
        return await continuation(handler_call_details)

    def _aborting(self, method: str, refusal: TokenRefusal) -> grpc.RpcMethodHandler:
        async def abort(_: object, context: grpc.aio.ServicerContext) -> None:
            self._note(method, context, refusal)
            await context.abort(refusal.code, refusal.message)

        # As a stream, whatever was called: only then gRPC does not read the message first.
        return grpc.stream_stream_rpc_method_handler(abort)


def _refusal(reason: str, said: str) -> TokenRefusal:
    return TokenRefusal(
        _UNAUTHENTICATED, f"{said}: send `authorization: Bearer TOKEN` with a token of this service", reason, ""
    )
