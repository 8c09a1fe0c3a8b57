//! Results of benchmarks lie in `results`; the harness is `shorthaul.bench` in the Python package.
//! The comparison of ONNX optimizers is `onnx/compare.py`, which needs `onnx/requirements.txt` as well.
