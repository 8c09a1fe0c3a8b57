//! The buffers that emulated launches work on.
//!
//! Owns their bytes, which of their elements were ever written, and the conversion from and to
//! numbers. Never knows of kernels.

use graph::{DType, Tensor, Values};

use kernels::memory::AlignedBuffer;

/// Named buffers, each its own block: nothing written to one is seen in another.
#[derive(Default)]
pub struct Memory {
    pub(super) buffers: Vec<DeviceBuffer>,
}

/// A block of elements of one type.
pub(super) struct DeviceBuffer {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) n_elements: usize,
    /// Its elements begin `start` bytes after the block's start, a multiple of 64.
    bytes: AlignedBuffer,
    pub(super) start: usize,
    /// A byte per element: 1 once it was written.
    pub(super) initialized: Vec<u8>,
    /// There was no memory for it.
    pub(super) is_missing: bool,
}

impl DeviceBuffer {
    /// `None` without the memory for it.
    fn unwritten(name: &str, dtype: DType, n: usize, start: usize) -> Option<Self> {
        // One byte more keeps empty buffers simple.
        let n_bytes = n.checked_mul(dtype.bytes())?.checked_add(start)?;
        let n_bytes = n_bytes.checked_add(1)?;
        let mut bytes = AlignedBuffer::zeroed(n_bytes)?;
        let mut initialized = Vec::new();
        initialized.try_reserve_exact(n).ok()?;
        initialized.resize(n, 0);
        bytes.as_mut_slice::<u8>().fill(0xff);
        Some(DeviceBuffer {
            name: name.to_string(),
            dtype,
            n_elements: n,
            bytes,
            start,
            initialized,
            is_missing: false,
        })
    }

    fn n_bytes(&self) -> usize {
        self.n_elements * self.dtype.bytes()
    }

    /// The elements' bytes.
    fn content(&self) -> &[u8] {
        &self.bytes.as_slice()[self.start..][..self.n_bytes()]
    }

    fn content_mut(&mut self) -> &mut [u8] {
        let n = self.n_bytes();
        &mut self.bytes.as_mut_slice()[self.start..][..n]
    }

    /// Where the first element lies.
    pub(super) fn address(&self) -> *mut u8 {
        self.bytes.as_ptr().wrapping_add(self.start)
    }
}

impl Memory {
    /// Adds a buffer with a tensor's elements, row-major, rounded to its type. Returns its index, for arguments.
    pub fn add(&mut self, name: &str, tensor: &Tensor) -> usize {
        let idx = self.add_unwritten(name, tensor.dtype, tensor.len());
        self.set(idx, tensor);
        idx
    }

    /// Adds a buffer of `n` elements that hold nothing: reading one before it is written is a fault. If
    /// the system has no memory for it, launches on it are refused.
    pub fn add_unwritten(&mut self, name: &str, dtype: DType, n: usize) -> usize {
        let buffer = DeviceBuffer::unwritten(name, dtype, n, 0);
        self.buffers.push(buffer.unwrap_or_else(|| DeviceBuffer {
            name: name.to_string(),
            dtype,
            n_elements: 0,
            bytes: AlignedBuffer::default(),
            start: 0,
            initialized: Vec::new(),
            is_missing: true,
        }));
        self.buffers.len() - 1
    }

    /// Moves a buffer with its contents to `bytes` (modulo 64) after a multiple of 64; at first it lies at
    /// such a multiple.
    pub fn place(&mut self, buffer: usize, bytes: usize) {
        let old = &mut self.buffers[buffer];
        let start = bytes % 64;
        if start == old.start {
            return;
        }
        let moved = DeviceBuffer::unwritten(&old.name, old.dtype, old.n_elements, start);
        let Some(mut moved) = moved.filter(|_| !old.is_missing) else {
            old.is_missing = true;
            return;
        };
        moved.content_mut().copy_from_slice(old.content());
        moved.initialized.copy_from_slice(&old.initialized);
        *old = moved;
    }

    /// Overwrites a buffer; elements beyond the shorter of the two stay as they are.
    pub fn set(&mut self, buffer: usize, tensor: &Tensor) {
        let buffer = &mut self.buffers[buffer];
        let size = buffer.dtype.bytes();
        let n = tensor.len().min(buffer.n_elements);
        let dtype = buffer.dtype;
        let places = buffer.content_mut().chunks_exact_mut(size);
        for (i, place) in places.take(n).enumerate() {
            match &tensor.values {
                Values::Float(v) => encode_float(dtype, v[i], place),
                Values::Int(v) => encode_int(dtype, v[i], place),
            }
        }
        buffer.initialized[..n].fill(1);
    }

    /// Overwrites the first bytes of a buffer, little-endian.
    pub fn set_bits(&mut self, buffer: usize, bytes: &[u8]) {
        let buffer = &mut self.buffers[buffer];
        let n = (bytes.len() / buffer.dtype.bytes()).min(buffer.n_elements);
        let room = n * buffer.dtype.bytes();
        buffer.content_mut()[..room].copy_from_slice(&bytes[..room]);
        buffer.initialized[..n].fill(1);
    }

    /// A buffer's elements.
    pub fn values(&self, buffer: usize) -> Vec<f64> {
        let buffer = &self.buffers[buffer];
        buffer
            .content()
            .chunks_exact(buffer.dtype.bytes())
            .map(|place| decode(buffer.dtype, place))
            .collect()
    }

    /// A buffer's elements as integers, exact for every integer type.
    pub fn integers(&self, buffer: usize) -> Vec<i64> {
        let buffer = &self.buffers[buffer];
        buffer
            .content()
            .chunks_exact(buffer.dtype.bytes())
            .map(|place| decode_int(buffer.dtype, place))
            .collect()
    }

    /// Adds a buffer with these bytes; `initialized` has a byte per element, 0 for those that hold nothing.
    pub fn add_bytes(
        &mut self,
        name: &str,
        dtype: DType,
        bytes: &[u8],
        initialized: &[u8],
    ) -> usize {
        let n = initialized.len().min(bytes.len() / dtype.bytes());
        let idx = self.add_unwritten(name, dtype, n);
        let buffer = &mut self.buffers[idx];
        // Fewer than asked for where memory ran out.
        let n = n.min(buffer.n_elements);
        let n_bytes = n * dtype.bytes();
        buffer.content_mut()[..n_bytes].copy_from_slice(&bytes[..n_bytes]);
        buffer.initialized.copy_from_slice(&initialized[..n]);
        idx
    }

    /// A buffer's bytes.
    pub fn bytes(&self, buffer: usize) -> &[u8] {
        self.buffers[buffer].content()
    }

    /// A buffer's name.
    pub fn name(&self, buffer: usize) -> &str {
        &self.buffers[buffer].name
    }

    /// Writes one element, rounded to the buffer's type; false where there is no such element.
    pub fn put(&mut self, buffer: usize, element: usize, value: f64) -> bool {
        let buffer = &mut self.buffers[buffer];
        let (dtype, size) = (buffer.dtype, buffer.dtype.bytes());
        let Some(known) = buffer.initialized.get_mut(element) else {
            return false;
        };
        *known = 1;
        let place = &mut buffer.content_mut()[element * size..][..size];
        encode_float(dtype, value, place);
        true
    }

    /// A byte per element of a buffer: 0 for those that were never written.
    pub fn initialized(&self, buffer: usize) -> &[u8] {
        &self.buffers[buffer].initialized
    }

    /// How many elements were never written, and the first of them.
    pub fn unwritten(&self, buffer: usize) -> Option<(usize, usize)> {
        let initialized = &self.buffers[buffer].initialized;
        let first = initialized.iter().position(|&known| known == 0)?;
        let n = initialized.iter().filter(|&&known| known == 0).count();
        Some((n, first))
    }
}

pub(super) fn encode_float(dtype: DType, value: f64, place: &mut [u8]) {
    match dtype {
        DType::F64 => place.copy_from_slice(&value.to_le_bytes()),
        DType::F32 => place.copy_from_slice(&(value as f32).to_le_bytes()),
        DType::BF16 => {
            let bits = (dtype.round(value) as f32).to_bits() >> 16;
            place.copy_from_slice(&(bits as u16).to_le_bytes());
        }
        DType::F16 => place.copy_from_slice(&f16_bits(dtype.round(value)).to_le_bytes()),
        _ => encode_int(dtype, value as i64, place),
    }
}

fn encode_int(dtype: DType, value: i64, place: &mut [u8]) {
    if dtype.is_float() {
        encode_float(dtype, value as f64, place);
    } else {
        let n = place.len();
        place.copy_from_slice(&value.to_le_bytes()[..n]);
    }
}

fn decode(dtype: DType, place: &[u8]) -> f64 {
    match dtype {
        DType::F64 => f64::from_bits(bits(place)),
        DType::F32 => f64::from(f32::from_bits(bits(place) as u32)),
        DType::BF16 => f64::from(f32::from_bits((bits(place) as u32) << 16)),
        DType::F16 => f16_value(bits(place) as u16),
        _ => decode_int(dtype, place) as f64,
    }
}

fn decode_int(dtype: DType, place: &[u8]) -> i64 {
    match dtype {
        DType::Bool | DType::U8 => i64::from(place[0]),
        DType::I8 => i64::from(place[0] as i8),
        DType::I16 => i64::from(bits(place) as i16),
        DType::I32 => i64::from(bits(place) as i32),
        DType::I64 => bits(place) as i64,
        _ => decode(dtype, place) as i64,
    }
}

fn bits(place: &[u8]) -> u64 {
    place
        .iter()
        .rev()
        .fold(0, |all, &byte| all << 8 | u64::from(byte))
}

/// The bits of a number that half precision holds exactly.
fn f16_bits(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let a = value.abs();
    if a.is_nan() {
        return 0x7e00;
    }
    if a.is_infinite() {
        return sign | 0x7c00;
    }
    // Below the smallest normal number, steps of 2^-24.
    if a < 2f64.powi(-14) {
        return sign | (a * 2f64.powi(24)) as u16;
    }
    let exponent = (a.to_bits() >> 52) as i64 - 1023 + 15;
    sign | (exponent as u16) << 10 | (a.to_bits() >> 42 & 0x3ff) as u16
}

fn f16_value(bits: u16) -> f64 {
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    match exponent {
        0 => sign * fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        e => sign * (1024.0 + fraction) * 2f64.powi(e - 25),
    }
}
