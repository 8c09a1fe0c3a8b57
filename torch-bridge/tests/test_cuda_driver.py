"""From a module to launches on a stream, with NVRTC's machine code and a driver that records calls.

The recording driver, cuBLASLt and cuDNN of the kernels' tests are compiled here, the driver loaded
under its name, in a process of its own: a process keeps the driver that it finds first. Tensors are
the host's, and no kernel runs.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shorthaul import cuda

SOURCES = Path(__file__).resolve().parents[2] / "kernels/cuda/tests"

SCRIPT = """
import ctypes, sys, torch
from torch import nn
driver = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
driver.mock_log.restype = ctypes.c_char_p
import shorthaul
from shorthaul import _native, cuda
from shorthaul._autocast import casting
from shorthaul._capture import capture
supported = frozenset(_native.supported_targets())

info = cuda.info()
assert info.driver == "13.0" and [d.arch for d in info.devices] == ["sm_90a"] * 2, info

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.mix, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.mix(nn.functional.gelu(self.norm(self.conv(x)))).mean((2, 3)))

with torch.autocast("cpu", torch.bfloat16):
    Net.forward = casting(Net.forward, torch.device("cpu"))
captured = capture(Net(), (torch.randn(2, 3, 8, 8),), supported=supported)
wrt = [i for i, spec in enumerate(captured.inputs) if spec.kind == "parameter"]
arguments = (captured.json, captured.constants, wrt)
program = _native.Program.compile_cuda(*arguments, 1, cuda.nvrtc_folders())
log = driver.mock_log().decode().splitlines()
names = [name for name, _, text in program.cuda_kernels()]
loaded = [line.split()[1] for line in log if line.startswith("cuModuleGetFunction")]
assert loaded == names and names, (loaded, names)
assert "cuDevicePrimaryCtxRetain 1" in log and any("\\x7fELF" in line for line in log)

driver.mock_reset()
driver.mock_params(1)
driver.mock_pointer_device(1)
def block(n): return torch.empty(n + 1, dtype=torch.uint8)
def memory(specs): return [torch.zeros(s, dtype=getattr(torch, t)) for _, s, t in specs]
inputs, outputs = memory(program.inputs), memory(program.outputs)
saved = block(program.saved_bytes)
scratch = block(max(program.forward_scratch_bytes, program.backward_scratch_bytes))
at = lambda tensors: [t.data_ptr() for t in tensors]
program.forward(at(inputs), at(outputs), saved.data_ptr(), scratch.data_ptr(), stream=4242)
forward = driver.mock_log().decode().splitlines()
grads = memory([program.inputs[i] for i in program.grad_inputs])
given = memory([program.outputs[i] for i in program.differentiable_outputs])
reads = [inputs[i] for i in program.backward_reads]
again = [outputs[i] for i in program.backward_output_reads]
program.backward(at(given), at(reads), at(again), saved.data_ptr(), at(grads), scratch.data_ptr(),
                 stream=4242)
both = driver.mock_log().decode().splitlines()
for calls in (forward, both[len(forward):]):
    assert calls[0] == "cuCtxPushCurrent 1" and calls[-1] == "cuCtxPopCurrent", calls
    launches = calls[1:-1]
    assert launches and all(c.startswith("cuLaunchKernel") for c in launches), calls
    assert all(" stream 4242 " in c for c in launches), calls

driver.mock_pointer_device(0)
try:
    program = _native.Program.compile_cuda(*arguments, 1, cuda.nvrtc_folders())
    program.forward(at(inputs), at(outputs), saved.data_ptr(), scratch.data_ptr())
except _native.CompileFailure as error:
    assert "is in memory of cuda:0, but the kernels run on cuda:1" in str(error), error
else:
    raise AssertionError("memory of another device was taken")

# Products by the library: all that it can, then those of a table.
blas, dnn = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(sys.argv[3])
blas.mock_log.restype = dnn.mock_log.restype = ctypes.c_char_p
driver.mock_reset()
driver.mock_pointer_device(1)
folders = cuda.nvrtc_folders()
every = ("library", 0, 1 << 20)
program = _native.Program.compile_cuda(*arguments, 1, folders, every=every)
taken = [row for row in program.cuda_products() if row[4] == "library"]
assert taken and all(row[5] == 0 for row in taken), program.cuda_products()
blas.mock_reset(), dnn.mock_reset()
saved = block(program.saved_bytes)
scratch = block(max(program.forward_scratch_bytes, program.backward_scratch_bytes))
timed = (saved.data_ptr(), scratch.data_ptr(), True, 4242)
times = program.forward(at(inputs), at(outputs), *timed)
assert len(times) == len(program.launch_kernels(False)), times
assert all(seconds == 1e-3 or abs(seconds - 1e-3) < 1e-9 for _, seconds in times), times
program.backward(at(given), at(reads), at(again), saved.data_ptr(), at(grads), scratch.data_ptr(),
                 stream=4242)
calls = [c for c in blas.mock_log().decode().splitlines() if c.startswith("cublasLtMatmul ")]
convolved = [row for row in taken if row[2].startswith("convolution ")]
assert convolved and len(calls) == len(taken) - len(convolved), (calls, taken)
assert all(c.endswith(" stream 4242") for c in calls), calls
calls = dnn.mock_log().decode().splitlines()
streams = [c for c in calls if c.startswith("cudnnSetStream ")]
assert len(streams) == len(convolved) and all(c.endswith(" 4242") for c in streams), calls
assert sum(c.startswith("execute ") for c in calls) == len(convolved), calls

import json
def table(device, version):
    candidates = [{"kind": "library", "rank": 0, "microseconds": 1}]
    entries = [{"product": taken[0][2], "rest": taken[0][3], "candidates": candidates}]
    machine = {"device": device, "driver": "13.0", "cublaslt": version}
    with open(sys.argv[4], "w") as file:
        json.dump({"format": "shorthaul products", "version": 1, "machine": machine,
                   "workspace_bytes": 4096, "entries": entries}, file)
    return _native.Program.compile_cuda(*arguments, 1, folders, table=sys.argv[4])
kinds = [row[4] for row in table("Mock 1", "13.4.1").cuda_products()]
assert kinds.count("library") == sum(row[2:4] == taken[0][2:4] for row in taken), kinds
for device, version, said in [("Mock 0", "13.4.1", "on a device Mock 0, but this is Mock 1"),
                              ("Mock 1", "13.5.0", "on cuBLASLt 13.5.0, but this is 13.4.1")]:
    try:
        table(device, version)
    except _native.CompileFailure as error:
        assert said in str(error), error
    else:
        raise AssertionError("a table of another machine was taken")

# A cuDNN that is not where its variable says is told, not left out.
import os
from shorthaul import products
torch.cuda.current_device = lambda: 1
found = products.machine()
assert (found["cublaslt"], found["cudnn"]) == ("13.4.1", "9.26.0"), found
os.environ["SHORTHAUL_CUDNN"] = "/nowhere"
try:
    products.machine()
except _native.CompileFailure as error:
    assert "SHORTHAUL_CUDNN names /nowhere, where no libcudnn.so is" in str(error), error
else:
    raise AssertionError("a folder without cuDNN was taken for none")

driver.mock_device(2, 12, 0)
try:
    _native.Program.compile_cuda(*arguments, 0, cuda.nvrtc_folders())
except _native.CompileFailure as error:
    assert "compute capability 12.0" in str(error), error
else:
    raise AssertionError("an unknown architecture was taken")
print("launches", len(both) - 4)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device's own driver is there")
def test_a_program_is_compiled_loaded_and_launched(tmp_path):
    compiler = shutil.which("cc")
    nvrtc = cuda.info().nvrtc
    if compiler is None or nvrtc is None:
        pytest.skip("needs a C compiler and NVRTC")
    libraries = []
    for name, source in (
        ("libcuda.so", "mock_libcuda.c"),
        ("libcublasLt.so", "mock_libcublaslt.c"),
        ("libcudnn.so", "mock_libcudnn.c"),
    ):
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", tmp_path / name]
        subprocess.run([compiler, *flags, SOURCES / source], check=True)
        libraries.append(tmp_path / name)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *libraries, tmp_path / "table.json"],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "SHORTHAUL_CUBLASLT": str(tmp_path),
            "SHORTHAUL_CUDNN": str(tmp_path),
        },
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split()[-1]) >= 6
