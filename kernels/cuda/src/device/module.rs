//! A CUDA program loaded onto a device.
//!
//! Owns the loaded cubins, the kernels, the products and the constants in the device's memory, and the
//! sequence of launches: no allocation, no copy and no waiting between the first and the last, so that a captured
//! stream records exactly them. Never compiles.
#![allow(unsafe_code)]

use super::driver::{self, EncodedMap, Event, Failure, Function, Module};
use super::products;
use super::{Device, Libraries};
use crate::machine::{Addresses, NoOperators, Operators, check};
use crate::nvrtc::Cubin;
use crate::passes::{Pass, PlacedLaunch};
use crate::vendor::{Call, LibraryProduct};
use crate::{CudaError, Kernel, LaunchOp, TensorMap};
use kernels::run::BufferRef;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Kernels and constants on one device.
pub struct CudaModule {
    device: Arc<Device>,
    modules: Vec<Module>,
    kernels: Vec<Loaded>,
    products: Vec<products::Loaded>,
    calls: Vec<Call>,
    constants: Vec<u64>,
    /// Wait after every launch, so that a fault is blamed on its kernel.
    blocking: bool,
    /// Whether the devices of the caller's buffers were asked for: once is enough.
    is_checked: AtomicBool,
    /// Whether a captured graph may hold its kernels and constants: then they stay for good.
    is_captured: AtomicBool,
}

struct Loaded {
    function: Function,
    threads: u32,
    /// The tensor map of each parameter that the copy engine reads.
    maps: Vec<Option<TensorMap>>,
    name: String,
    origin: String,
}

impl CudaModule {
    /// Loads cubins, each with the next of `kernels`, and uploads constants. `launches` tell how
    /// much dynamic shared memory each kernel will be launched with.
    ///
    /// # Errors
    /// Cubins of another architecture, too much shared memory, no memory, a call that fails.
    pub fn load<'l>(
        device: &Arc<Device>,
        kernels: &[Kernel],
        cubins: &[Cubin],
        constants: &[Vec<u8>],
        launches: impl Iterator<Item = &'l PlacedLaunch>,
    ) -> Result<CudaModule, CudaError> {
        let mut module = CudaModule {
            device: Arc::clone(device),
            modules: Vec::new(),
            kernels: Vec::new(),
            products: Vec::new(),
            calls: Vec::new(),
            constants: Vec::new(),
            blocking: std::env::var("SHORTHAUL_CUDA_BLOCKING").is_ok_and(|v| v != "0"),
            is_checked: AtomicBool::new(false),
            is_captured: AtomicBool::new(false),
        };
        let ordinal = device.info.ordinal;
        if let Some(cubin) = cubins.iter().find(|cubin| cubin.arch != device.arch) {
            return Err(CudaError::WrongArch {
                ordinal,
                compiled: cubin.arch,
                device: device.arch,
            });
        }
        device.context.within(|| {
            device.dropped().release();
            let mut rest = kernels;
            for cubin in cubins {
                let (batch, others) = rest.split_at(cubin.resources.len().min(rest.len()));
                module.load_batch(batch, cubin)?;
                rest = others;
            }
            if !rest.is_empty() {
                let origins: Vec<&str> = rest.iter().map(|k| k.origin.as_str()).collect();
                return Err(CudaError::Load {
                    ordinal,
                    origins: shortened(&origins),
                    problem: "no machine code was given for them".to_string(),
                });
            }
            for bytes in constants {
                module.upload(bytes)?;
            }
            module.allow_shared_memory(launches)
        })??;
        Ok(module)
    }

    /// Returns the module with a program's products, ready to be launched.
    ///
    /// # Errors
    /// A library refuses one, does not offer the algorithm that was chosen, or is not there.
    pub fn with_products<'l>(
        mut self,
        libraries: &Libraries,
        products: &[LibraryProduct],
        launches: impl Iterator<Item = &'l PlacedLaunch>,
    ) -> Result<CudaModule, CudaError> {
        let mut origins = vec![String::new(); products.len()];
        for launch in launches {
            if let LaunchOp::Product(n) = launch.work
                && let Some(origin) = origins.get_mut(n).filter(|origin| origin.is_empty())
            {
                origin.clone_from(&launch.origin);
            }
        }
        let device = Arc::clone(&self.device);
        let load = || products::load(&device, libraries, products, &origins);
        self.products = device.context.within(load)??;
        Ok(self)
    }

    /// Returns the module with a program's calls. Whoever runs it brings their operators.
    #[must_use]
    pub fn with_calls(mut self, calls: &[Call]) -> CudaModule {
        self.calls = calls.to_vec();
        self
    }

    fn load_batch(&mut self, kernels: &[Kernel], cubin: &Cubin) -> Result<(), CudaError> {
        let ordinal = self.device.info.ordinal;
        let refused = |failure: Failure, kernels: &[Kernel]| {
            let origins: Vec<&str> = kernels.iter().map(|k| k.origin.as_str()).collect();
            let doing = format!("loading {} bytes of kernels", cubin.bytes.len());
            match failure.is_out_of_memory() {
                true => CudaError::OutOfMemory { ordinal, doing },
                false => CudaError::Load {
                    ordinal,
                    origins: shortened(&origins),
                    problem: failure.problem,
                },
            }
        };
        let loaded = Module::load(&cubin.bytes).map_err(|f| refused(f, kernels))?;
        self.modules.push(loaded);
        for kernel in kernels {
            let maps: Vec<_> = kernel.params.iter().map(|p| p.ty.map()).collect();
            if maps.iter().any(Option::is_some) && !EncodedMap::is_known() {
                return Err(CudaError::OldDriver {
                    kernel: kernel.name.clone(),
                    origin: kernel.origin.clone(),
                    ordinal,
                    version: driver::version()?,
                });
            }
            let name = CString::new(kernel.name.as_str()).unwrap_or_default();
            let function = loaded.function(&name);
            self.kernels.push(Loaded {
                function: function.map_err(|f| refused(f, std::slice::from_ref(kernel)))?,
                threads: kernel.threads,
                maps,
                name: kernel.name.clone(),
                origin: kernel.origin.clone(),
            });
        }
        Ok(())
    }

    fn upload(&mut self, bytes: &[u8]) -> Result<(), CudaError> {
        let ordinal = self.device.info.ordinal;
        let failed = |failure: Failure| match failure.is_out_of_memory() {
            true => CudaError::OutOfMemory {
                ordinal,
                doing: format!("{} bytes of constants were wanted", bytes.len()),
            },
            false => failure.of_call("cuMemcpyHtoD", ordinal),
        };
        let address = match bytes.is_empty() {
            true => 0,
            false => driver::upload(bytes).map_err(failed)?,
        };
        self.constants.push(address);
        Ok(())
    }

    /// More than 48 KiB must be allowed before the first launch.
    fn allow_shared_memory<'l>(
        &self,
        launches: impl Iterator<Item = &'l PlacedLaunch>,
    ) -> Result<(), CudaError> {
        let mut most = vec![0; self.kernels.len()];
        for launch in launches {
            if let LaunchOp::Kernel(n) = launch.work {
                most[n] = launch.dynamic_shared_bytes.max(most[n]);
            }
        }
        let info = &self.device.info;
        for (kernel, bytes) in self.kernels.iter().zip(most) {
            if i64::from(bytes) > i64::from(info.shared_bytes) {
                return Err(CudaError::SharedMemory {
                    kernel: kernel.name.clone(),
                    origin: kernel.origin.clone(),
                    ordinal: info.ordinal,
                    bytes,
                    most: info.shared_bytes,
                });
            }
            if bytes > 0 {
                let allowed = kernel.function.allow_dynamic_shared(bytes);
                allowed.map_err(|f| f.of_call("cuFuncSetAttribute", info.ordinal))?;
            }
        }
        Ok(())
    }

    /// Whether to wait after every launch, so that a failure is blamed on its kernel; at first what
    /// `SHORTHAUL_CUDA_BLOCKING` says. A stream that is being captured is never waited for.
    pub fn set_blocking(&mut self, blocking: bool) {
        self.blocking = blocking;
    }

    /// The device that it is loaded on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Enqueues the launches of a pass.
    ///
    /// # Errors
    /// Addresses that do not fit, a launch that the driver refuses, a device that had failed before.
    ///
    /// # Safety
    /// As for [`crate::machine::Machine::run`].
    pub unsafe fn run(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
    ) -> Result<(), CudaError> {
        // SAFETY: passed on.
        unsafe { self.run_with(pass, stream, addresses, &NoOperators) }
    }

    /// Like [`CudaModule::run`], with operators for the program's calls. They enqueue on the stream too.
    ///
    /// # Errors
    /// As for [`CudaModule::run`]; a call that fails.
    ///
    /// # Safety
    /// As for [`crate::machine::Machine::run_with`].
    pub unsafe fn run_with(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
        operators: &dyn Operators,
    ) -> Result<(), CudaError> {
        check(pass, addresses)?;
        self.device.context.within(|| {
            self.check_devices(pass, addresses)?;
            let captures = driver::is_capturing(stream)
                .map_err(|f| f.of_call("cuStreamIsCapturing", self.device.info.ordinal))?;
            if captures {
                self.is_captured.store(true, Ordering::Relaxed);
            }
            let waits = self.blocking && !captures;
            let mut calls = 0;
            for launch in &pass.launches {
                // SAFETY: passed on.
                unsafe { self.launch(launch, stream, addresses, (operators, &mut calls))? };
                if waits {
                    driver::wait(stream).map_err(|f| self.failed(launch, f))?;
                }
            }
            Ok(())
        })?
    }

    /// Like [`CudaModule::run`], but waits, and returns the seconds of each launch: the time from the end of the one
    /// before, measured by events in the stream.
    ///
    /// # Errors
    /// As for [`CudaModule::run`]; a stream that is being captured cannot be waited for.
    ///
    /// # Safety
    /// As for [`crate::machine::Machine::run`].
    pub unsafe fn run_timed(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
    ) -> Result<Vec<f64>, CudaError> {
        // SAFETY: passed on.
        unsafe { self.run_timed_with(pass, stream, addresses, &NoOperators) }
    }

    /// Like [`CudaModule::run_timed`], with operators for the program's calls.
    ///
    /// # Errors
    /// As for [`CudaModule::run_timed`]; a call that fails.
    ///
    /// # Safety
    /// As for [`crate::machine::Machine::run_with`].
    pub unsafe fn run_timed_with(
        &self,
        pass: &Pass,
        stream: u64,
        addresses: &Addresses<'_>,
        operators: &dyn Operators,
    ) -> Result<Vec<f64>, CudaError> {
        check(pass, addresses)?;
        let failed = |f: Failure| f.of_call("cuEventRecord", self.device.info.ordinal);
        self.device.context.within(|| {
            self.check_devices(pass, addresses)?;
            let mut events = vec![Event::record(stream).map_err(failed)?];
            let mut calls = 0;
            for launch in &pass.launches {
                // SAFETY: passed on.
                unsafe { self.launch(launch, stream, addresses, (operators, &mut calls))? };
                events.push(Event::record(stream).map_err(failed)?);
            }
            let between = events.windows(2).map(|e| e[1].seconds_since(&e[0]));
            between.collect::<Result<_, _>>().map_err(failed)
        })?
    }

    /// # Safety
    /// As for `run`.
    unsafe fn launch(
        &self,
        launch: &PlacedLaunch,
        stream: u64,
        addresses: &Addresses<'_>,
        (operators, calls): (&dyn Operators, &mut usize),
    ) -> Result<(), CudaError> {
        let place = |at: BufferRef| match at {
            BufferRef::Arena(offset) => addresses.arena + offset as u64,
            BufferRef::Saved(offset) => addresses.saved + offset as u64,
            BufferRef::External(slot) => addresses.externals[slot],
            BufferRef::Constant(n) => self.constants[n],
        };
        let mut values: Vec<u64> = launch.args.iter().map(|a| place(a.at)).collect();
        let kernel = match launch.work {
            LaunchOp::Kernel(n) => &self.kernels[n],
            LaunchOp::Product(n) => {
                let (loaded, ordinal) = (&self.products[n], self.device.info.ordinal);
                // SAFETY: passed on.
                let launched = unsafe { loaded.launch(&values, stream) };
                return launched.map_err(|complaint| {
                    products::of_product(complaint, loaded.product(), &launch.origin, ordinal)
                });
            }
            LaunchOp::Call(n) => {
                *calls += 1;
                let called = operators.call(*calls - 1);
                return called.map_err(|problem| CudaError::Operator {
                    operator: self.calls[n].operator(),
                    origin: launch.origin.clone(),
                    problem,
                });
            }
        };
        let encode = |(map, address): (&Option<TensorMap>, &u64)| {
            let encoded = map.map(|map| EncodedMap::new(&map, *address));
            encoded.transpose()
        };
        let maps = kernel.maps.iter().zip(&values).map(encode);
        let maps: Result<Vec<Option<EncodedMap>>, Failure> = maps.collect();
        let mut maps = maps.map_err(|f| self.refused(kernel, launch, f))?;
        let pointer = |(value, map): (&mut u64, &mut Option<EncodedMap>)| match map {
            Some(map) => map.as_argument(),
            None => std::ptr::from_mut(value).cast::<c_void>(),
        };
        let mut args: Vec<*mut c_void> = values.iter_mut().zip(&mut maps).map(pointer).collect();
        let (grid, shared) = (launch.grid, launch.dynamic_shared_bytes);
        // SAFETY: every parameter is an address or a map, and both outlive the call, which copies them.
        let launched = unsafe {
            kernel
                .function
                .launch(grid, kernel.threads, shared, stream, &mut args)
        };
        launched.map_err(|f| self.refused(kernel, launch, f))
    }

    /// The first run asks the driver whose memory the buffers are: a kernel would fail on others' and
    /// take the whole context with it.
    fn check_devices(&self, pass: &Pass, addresses: &Addresses<'_>) -> Result<(), CudaError> {
        if self.is_checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let expected = self.device.info.ordinal;
        let externals = addresses.externals.iter().zip(&pass.externals);
        let mut all: Vec<(String, u64)> = Vec::new();
        for (slot, (address, spec)) in externals.enumerate() {
            if spec.bytes > 0 {
                all.push((format!("buffer {slot}"), *address));
            }
        }
        let blocks = [
            ("the arena", addresses.arena, pass.arena_bytes),
            ("the saved block", addresses.saved, pass.saved_bytes),
        ];
        let used = blocks.iter().filter(|(_, _, bytes)| *bytes > 0);
        all.extend(used.map(|(name, address, _)| (name.to_string(), *address)));
        for (buffer, address) in all {
            let found = match driver::device_of(address) {
                Some(found) if found == expected => continue,
                Some(found) => format!("cuda:{found}"),
                None => "the host".to_string(),
            };
            return Err(CudaError::WrongDevice {
                buffer,
                found,
                expected,
            });
        }
        self.is_checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn refused(&self, kernel: &Loaded, launch: &PlacedLaunch, failure: Failure) -> CudaError {
        let (name, origin) = (kernel.name.clone(), launch.origin.clone());
        let ordinal = self.device.info.ordinal;
        if failure.is_context_lost() {
            return CudaError::FailedEarlier {
                kernel: name,
                origin,
                ordinal,
                problem: failure.problem,
            };
        }
        if failure.is_out_of_memory() {
            let doing = format!("launching kernel {name} (of {origin})");
            return CudaError::OutOfMemory { ordinal, doing };
        }
        CudaError::Launch {
            kernel: name,
            origin,
            ordinal,
            problem: failure.problem,
        }
    }

    fn failed(&self, launch: &PlacedLaunch, failure: Failure) -> CudaError {
        CudaError::Failed {
            kernel: match launch.work {
                LaunchOp::Kernel(n) => self.kernels[n].name.clone(),
                LaunchOp::Product(n) => {
                    let product = self.products[n].product();
                    let (name, operation) = (&product.name, &product.operation);
                    format!("{name} ({}'s {operation})", operation.library())
                }
                LaunchOp::Call(n) => {
                    let call = &self.calls[n];
                    format!("{} ({})", call.name, call.operator())
                }
            },
            origin: launch.origin.clone(),
            ordinal: self.device.info.ordinal,
            problem: failure.problem,
        }
    }
}

/// What dropped modules held on a device.
#[derive(Default)]
pub(super) struct Dropped {
    modules: Vec<Module>,
    constants: Vec<u64>,
}

impl Dropped {
    /// Gives it back to the driver, with the context current. What cannot be waited for, in another
    /// thread's capture or after a lost context, is kept for the next time.
    fn release(&mut self) {
        // Their last launches may still be under way.
        if self.modules.is_empty() || driver::wait_for_all().is_err() {
            return;
        }
        // SAFETY: nobody can launch kernels of a dropped module that was never captured, and what was
        // launched is done.
        unsafe {
            for address in self.constants.drain(..).filter(|address| *address != 0) {
                let _ = driver::free(address);
            }
            for module in self.modules.drain(..) {
                let _ = module.unload();
            }
        }
    }
}

impl Drop for CudaModule {
    /// Python may drop a program at any time, also while a stream is captured, when nothing may be
    /// unloaded. So the next load on the device does it. A graph that was captured may be replayed after
    /// the program is gone, and nobody knows when it is gone itself: what it may hold stays loaded.
    fn drop(&mut self) {
        if self.is_captured.load(Ordering::Relaxed) {
            return;
        }
        let mut dropped = self.device.dropped();
        dropped.modules.append(&mut self.modules);
        dropped.constants.append(&mut self.constants);
    }
}

fn shortened(origins: &[&str]) -> String {
    const SHOWN: usize = 4;
    let mut text = origins[..origins.len().min(SHOWN)].join(", ");
    if origins.len() > SHOWN {
        text.push_str(&format!(" and {} more", origins.len() - SHOWN));
    }
    text
}
