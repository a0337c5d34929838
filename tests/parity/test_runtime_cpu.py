"""The cpu target: binding by address, errors, lifetimes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from estream.errors import TargetError, UsageError
from estream.runtime import Buffer, Graph, open_target
from estream.runtime import cpu as cpu_module
from estream.runtime import graph as graph_module
from estream.runtime.capi import find_library, load_capi
from estream.runtime.cpu import CpuTarget
from estream.runtime.processor import host_integer_graphs, integer_fault, integer_graphs


def save(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    element: int = onnx.TensorProto.FLOAT,
) -> Path:
    def infos(tensors: dict[str, list[int | str]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, element, shape) for name, shape in tensors.items()]

    graph = helper.make_graph(nodes, "test", infos(inputs), infos(outputs))
    path = folder / "scale.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """y [rows, 4] = x [rows, 4] · w [4]."""
    shapes: dict[str, list[int | str]] = {"x": ["rows", 4], "w": [4]}
    return save(tmp_path, [helper.make_node("Mul", ["x", "w"], ["y"])], shapes, {"y": ["rows", 4]})


@pytest.fixture
def target() -> Iterator[CpuTarget]:
    with CpuTarget(threads=1) as opened:
        yield opened


def bind(target: CpuTarget, graph: Graph, rows: int) -> tuple[Buffer, Buffer, Buffer]:
    buffers = target.allocate(4096, "x"), target.allocate(16, "w"), target.allocate(4096, "y")
    x, w, y = buffers
    x.array(np.float32, (rows, 4))[...] = np.arange(rows * 4).reshape(rows, 4)
    w.array(np.float32, (4,))[...] = [1, 10, 100, 1000]
    graph.bind("x", x, rows)
    graph.bind("w", w)
    graph.bind("y", y, rows)
    return buffers


def want(rows: int) -> np.ndarray:
    return np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) * np.array([1, 10, 100, 1000], np.float32)


def test_tensors_are_described(target: CpuTarget, path: Path) -> None:
    graph = target.load(path)
    assert graph.name == "scale"
    assert {name: (info.dtype, info.shape) for name, info in graph.inputs.items()} == {
        "x": (np.dtype(np.float32), ("rows", 4)),
        "w": (np.dtype(np.float32), (4,)),
    }
    assert list(graph.outputs) == ["y"]


def test_runs_on_memory_where_it_lies(target: CpuTarget, path: Path) -> None:
    graph = target.load(path)
    x, w, y = bind(target, graph, 3)
    graph.run()
    np.testing.assert_array_equal(y.array(np.float32, (3, 4)), want(3))
    w.array(np.float32, (4,))[...] *= 2  # weights are read again on every run
    graph.run()
    np.testing.assert_array_equal(y.array(np.float32, (3, 4)), 2 * want(3))
    for tensor, buffer in (("x", x.part(16, 16)), ("y", y)):
        graph.bind(tensor, buffer, 1)
    graph.run()
    np.testing.assert_array_equal(y.array(np.float32, (1, 4)), 2 * want(3)[1:2])


def test_one_address_as_input_and_output(target: CpuTarget, path: Path) -> None:
    graph = target.load(path)
    x, _, _ = bind(target, graph, 5)
    graph.bind("y", x, 5)
    graph.run()
    np.testing.assert_array_equal(x.array(np.float32, (5, 4)), want(5))


def test_memory_is_aligned_zeroed_and_uncommitted(target: CpuTarget) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    buffers = [target.allocate(1 << 30, "arena"), target.allocate(12345, "odd")]
    assert resident_bytes() - before < 16 << 20
    assert target.allocated_bytes == (1 << 30) + 12345
    for buffer in buffers:
        assert buffer.address % 4096 == 0
        assert not buffer.array(np.uint8, (4096,)).any()
        buffer.memory()[-1] = 1
    with pytest.raises(TargetError, match=r"memory for everything .*asked 1152921504606846976 bytes.*Give a smaller"):
        target.allocate(1 << 60, "everything")
    with pytest.raises(TargetError, match="nothing must be positive"):
        target.allocate(0, "nothing")


def test_bindings_that_cannot_be_meant(target: CpuTarget, path: Path) -> None:
    graph = target.load(path)
    with pytest.raises(TargetError, match="graph scale: tensor x is not bound"):
        graph.run()
    x, w, _ = bind(target, graph, 3)
    with pytest.raises(TargetError, match=r"graph scale has no tensor z \(had x, w, y\)"):
        graph.bind("z", x, 3)
    with pytest.raises(
        TargetError, match=r"graph scale, tensor x: the buffer is too small \(asked 4112 bytes, had 4096"
    ):
        graph.bind("x", x, 257)
    with pytest.raises(TargetError, match="tensor x: the buffer is too small"):
        graph.bind("x", x.part(0, 40), 3)  # same address and rows as a binding that fitted
    with pytest.raises(TargetError, match="tensor x: rows missing"):
        graph.bind("x", x)
    with pytest.raises(TargetError, match="tensor w: rows not wanted"):
        graph.bind("w", w, 4)
    with pytest.raises(TargetError, match="tensor x: rows must be at least 1"):
        graph.bind("x", x, 0)
    graph.run()  # the refused bindings changed nothing
    graph.bind("x", x, 2)
    with pytest.raises(TargetError, match="graph scale: rows of y differs from that of x"):
        graph.run()


def test_graphs_that_cannot_be_loaded(target: CpuTarget, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="graph absent: no file"):
        target.load(tmp_path / "absent.onnx")
    (tmp_path / "damaged.onnx").write_bytes(b"not a graph")
    with pytest.raises(TargetError, match=r"graph damaged: .*Protobuf"):
        target.load(tmp_path / "damaged.onnx")
    identity = [helper.make_node("Identity", ["x"], ["y"])]
    with pytest.raises(TargetError, match="tensor x: more than one symbolic dimension"):
        target.load(save(tmp_path, identity, {"x": ["a", "b"]}, {"y": ["a", "b"]}))
    with pytest.raises(TargetError, match=r"tensor x: element type 8 is not supported"):
        target.load(save(tmp_path, identity, {"x": [2]}, {"y": [2]}, onnx.TensorProto.STRING))


def test_the_run_times_own_error_names_the_graph(
    target: CpuTarget, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = [helper.make_node("Gather", ["table", "index"], ["x"])]
    shapes: dict[str, list[int | str]] = {"table": [4], "index": [1]}
    path = save(tmp_path, nodes, shapes, {"x": [1]})
    model = onnx.load(path)
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(model, path)
    graph = target.load(path)
    for name in ("table", "index", "x"):
        graph.bind(name, target.allocate(64, name))
    index = target.allocate(8, "index")
    index.array(np.int64, (1,))[0] = 9
    graph.bind("index", index)
    with pytest.raises(TargetError, match=r"graph scale: .*indices element out of data bounds"):
        graph.run()
    index.array(np.int64, (1,))[0] = 3
    graph.run()  # usable after an error
    assert capfd.readouterr().err == ""  # the error is told once, by the exception


def test_cached_handles_are_bounded(target: CpuTarget, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "MAX_VALUES", 8)
    graph = target.load(path)
    x, _, y = bind(target, graph, 1)
    for step in range(100):
        graph.bind("x", x.part(16 * step, 16), 1)
        graph.run()
        x.array(np.float32, (256, 4))[step] = step
        graph.run()
        np.testing.assert_array_equal(y.array(np.float32, (1, 4))[0], step * np.array([1, 10, 100, 1000]))
    assert len(graph._values) <= 8


def test_two_targets_and_closing(path: Path) -> None:
    first, second = CpuTarget(threads=2), CpuTarget(threads=1)  # the second gets pools of its own
    third = CpuTarget(threads=2)
    graphs = [target.load(path) for target in (first, second, third)]
    outputs = [bind(target, graph, 3)[2] for target, graph in zip((first, second, third), graphs, strict=True)]
    first.close()
    first.close()
    for index, target in ((1, second), (2, third)):
        graphs[index].run()
        np.testing.assert_array_equal(outputs[index].array(np.float32, (3, 4)), want(3))
        target.close()
    with pytest.raises(TargetError, match="cannot run graph scale: the target is closed"):
        graphs[0].run()
    with pytest.raises(TargetError, match="cannot bind x of graph scale: the target is closed"):
        graphs[0].bind("x", outputs[1], 1)
    with pytest.raises(TargetError, match="cannot load scale: the target is closed"):
        first.load(path)
    with pytest.raises(TargetError, match="cannot allocate more: the target is closed"):
        first.allocate(64, "more")
    with CpuTarget() as again:  # the environment was released and can be made again
        graph = again.load(path)
        y = bind(again, graph, 2)[2]
        graph.run()
        np.testing.assert_array_equal(y.array(np.float32, (2, 4)), want(2))


def test_libraries_that_are_not_the_run_time(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no libonnxruntime\.so in"):
        open_target("cpu", libraries=tmp_path)
    (tmp_path / "libonnxruntime.so").write_text("text")
    with pytest.raises(TargetError, match=r"libonnxruntime\.so cannot be loaded"):
        open_target("cpu", libraries=tmp_path)
    assert load_capi(find_library()) is load_capi()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("dtype", ["INT8", "UINT8"])  # int8 weights, int4 nibbles
def test_integer_weights_are_refused_where_their_kernel_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, reference: bool
) -> None:
    identity = [helper.make_node("Identity", ["w"], ["y"])]
    path = save(tmp_path, identity, {"w": [2]}, {"y": [2]}, onnx.TensorProto.DataType.Value(dtype))
    monkeypatch.setattr(cpu_module, "host_integer_fault", lambda version: f"{version} saturates")
    with CpuTarget(reference=reference) as target:
        if reference:
            target.load(path)
        else:
            with pytest.raises(
                TargetError, match=r"graph scale takes integer weights, and 1\.\d+.* saturates.*--reference"
            ):
                target.load(path)


@pytest.mark.parametrize(
    ("version", "machine", "flags", "fault"),
    [
        ("1.32.0", "x86_64", "avx2 avx512_vnni amx_int8", None),
        ("1.24.4", "x86_64", "avx2 avx_vnni", None),
        ("1.24.4", "x86_64", "avx2 avx512_vnni amx_int8", "wrong on a processor with AMX"),
        ("1.24.4", "aarch64", "", None),
    ],
)
def test_processors_with_wrong_integer_kernels(version: str, machine: str, flags: str, fault: str | None) -> None:
    found = integer_fault(version, machine, frozenset(flags.split()))
    assert found is None if fault is None else fault in (found or "")


@pytest.mark.parametrize(
    ("machine", "flags", "graphs"),
    [
        ("x86_64", "avx2 avx512_vnni", "cpu"),
        ("AMD64", "avx2 avx_vnni", "cpu"),
        ("x86_64", "avx2 fma", "cpu-u8"),
        ("x86_64", "", "cpu"),
        ("aarch64", "", "cpu"),
    ],
)
def test_integer_graphs_follow_the_processor(machine: str, flags: str, graphs: str) -> None:
    assert integer_graphs(machine, frozenset(flags.split())) == graphs


def test_options_of_open_target() -> None:
    with pytest.raises(UsageError, match="threads must be a whole number, 1 to 256"):
        open_target("cpu", threads=0)
    with pytest.raises(UsageError, match=r"unknown target \(asked gpu, had cpu, htp, mock\)"):
        open_target("gpu")
    for reference, graphs in ((False, host_integer_graphs()), (True, "reference")):
        target = open_target("cpu", reference=reference)
        assert (target.name, target.graphs, target.max_rows) == ("cpu", graphs, 512)
        target.close()


def test_the_python_package_of_the_run_time_is_not_imported(path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom estream.runtime import open_target\n"
        "target = open_target('cpu')\ntarget.load(Path(sys.argv[1]))\ntarget.close()\n"
        "print('onnxruntime' in sys.modules, 'onnx' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""
