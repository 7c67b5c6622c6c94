"""Why a request gets no answer."""


class RequestError(Exception):
    """A request that gets no answer. Each protocol writes it in its own form (`error`).

    status         of HTTP: 400 to 499 is the request's fault, 500 and above ours
    param          the field of the body that is at fault
    code           what programs look for, such as "context_length_exceeded"
    retry_after_s  after which the same request may be answered
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s


class FieldError(RequestError, ValueError):
    """A request that cannot be met because of the field `param`."""

    def __init__(self, param: str, message: str, *, code: str | None = None):
        super().__init__(400, f"{param}: {message}", param=param, code=code)
