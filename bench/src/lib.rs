//! Results of benchmarks lie in `results`; the harness is `shorthaul.bench` in the Python package.
