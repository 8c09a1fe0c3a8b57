//! A driver from before the copy engine of Hopper: a program that uses it is refused with a sentence when it is
//! loaded, and nothing else is. In a process of its own, which has one driver.
#![allow(unsafe_code)]

use cuda_kernels::device::{self, CudaModule, Device};
use cuda_kernels::nvrtc::{Cubin, Resources};
use cuda_kernels::{Kernel, Param, ParamType, TensorMap};
use graph::DType;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::process::Command;

fn kernel(ty: ParamType) -> Kernel {
    Kernel {
        name: "sh_k0".into(),
        text: String::new(),
        params: vec![Param {
            name: "x".into(),
            ty,
        }],
        threads: 128,
        min_blocks: 1,
        origin: "layers.0 (net.py:3)".into(),
    }
}

#[test]
fn an_old_driver_is_told_where_the_copy_engine_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libcuda.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-DOLD_DRIVER", "-Wl,-soname,libcuda.so"])
        .arg("-o")
        .arg(&path)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mock_libcuda.c"))
        .status();
    assert!(compiled.unwrap().success());
    // SAFETY: our own library, which has no constructors; it is found before any other driver.
    let _driver = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL).unwrap() };
    assert_eq!(device::driver_version().unwrap(), "11.8");
    let device = Device::open(0).unwrap();
    let cubins = [Cubin {
        arch: device.arch(),
        bytes: b"MOCK-ELF".to_vec(),
        resources: vec![Resources {
            kernel: "sh_k0".into(),
            registers: 32,
            stack_bytes: 0,
            spill_store_bytes: 0,
            spill_load_bytes: 0,
            static_shared_bytes: 0,
        }],
        log: String::new(),
    }];
    let load = |ty| {
        let none = std::iter::empty();
        CudaModule::load(&device, &[kernel(ty)], &cubins, &[], none).map(drop)
    };
    load(ParamType::In(DType::BF16)).unwrap();
    let map = TensorMap {
        dtype: DType::BF16,
        offset: 0,
        sizes: [64, 40, 1],
        strides: [64, 2560],
        lines: [128, 1],
    };
    let refused = load(ParamType::Map(map)).unwrap_err().to_string();
    assert_eq!(
        refused,
        "kernel sh_k0 (of layers.0 (net.py:3)) is fed by the copy engine of Hopper, which the driver of \
         cuda:0 (for CUDA 11.8) does not know; install one for CUDA 12.0 or newer, or leave the table of \
         products out"
    );
}
