"""C++ that is compiled beside what goes on meanwhile.

An outer step is two graphs or more. Without this module Python would wait while the C++ of the
first is compiled, and only then trace the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any


class Later:
    """A function of which the C++ is being compiled. Whoever calls it waits for that.

    Args:
        get: waits, and gives the function.
        failed: what to raise for an error of the compiler.
    """

    def __init__(
        self, get: Callable[[], Callable[..., Any]], failed: Callable[[Exception], Exception]
    ) -> None:
        self._get = get
        self._failed = failed

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        try:
            return self._get()
        except Exception as error:
            raise self._failed(error) from error

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@contextmanager
def built_beside(failed: Callable[[Exception], Exception]) -> Iterator[None]:
    """Inside, torch hands on a :class:`Later` where it would wait for C++ to be compiled."""
    from torch._inductor.codecache import CppWrapperCodeCache

    cache: Any = CppWrapperCodeCache
    before = vars(cache).get("load_pybinding")

    def load(*arguments: Any, **options: Any) -> Later:
        get = cache.load_pybinding_async(*arguments, **options, submit_fn=_beside)
        return Later(get, failed)

    cache.load_pybinding = load
    try:
        yield
    finally:
        if before is None:  # it is that of a class above
            del cache.load_pybinding
        else:
            cache.load_pybinding = before


def _beside(build: Callable[[], None]) -> Future[None]:
    """Run it in a thread of its own, which does nothing but wait for a compiler."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(build)
    thread.shutdown(wait=False)
    return future
