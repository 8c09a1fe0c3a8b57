//! Tensors of a file, decoded only when asked for, from the file itself or from one beside it.
//!
//! Owns where elements are. Reads external data range by range and never keeps it.

use crate::element::Element;
use crate::operators::bounds::ALWAYS;
use crate::proto::{SparseTensorProto, TensorProto};
use crate::same_type;
use crate::tensor::{Tensor, Values, of_parts, of_raw, sizes};
use bytes::Bytes;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Constants of up to this many elements stay decoded.
const KEPT_ELEMENTS: usize = 1 << 16;

/// Bytes of elements in another file that are kept to tell tensors apart.
const HEAD: u64 = 64;

/// An initializer.
#[derive(Clone, Debug)]
pub struct Stored {
    proto: TensorProto,
    folder: Arc<Path>,
    decoded: OnceLock<Tensor>,
    /// The first bytes of elements in another file, once they were asked for; `None` if there are none.
    head: OnceLock<Option<(External, Vec<u8>)>>,
    /// The value of all elements, if they are equal and not stored one by one.
    every: Option<Tensor>,
}

impl Stored {
    /// A tensor as a file stores it; external data is looked for in `folder`.
    pub fn new(proto: TensorProto, folder: &Arc<Path>) -> Stored {
        Stored {
            proto,
            folder: Arc::clone(folder),
            decoded: OnceLock::new(),
            head: OnceLock::new(),
            every: None,
        }
    }

    /// A tensor computed here.
    pub fn of_tensor(name: &str, tensor: Tensor) -> Stored {
        let proto = tensor.to_proto(name);
        let decoded = OnceLock::new();
        if tensor.len() <= KEPT_ELEMENTS {
            // Just made, so there is nothing in it yet.
            let _ = decoded.set(tensor);
        }
        Stored {
            proto,
            folder: Arc::from(Path::new(".")),
            decoded,
            head: OnceLock::new(),
            every: None,
        }
    }

    /// A tensor of those sizes whose elements all are the one of `every`; made when asked for.
    pub fn filled(shape: &[usize], every: Tensor) -> Stored {
        let proto = TensorProto {
            dims: shape.iter().map(|n| *n as i64).collect(),
            data_type: every.element().number(),
            ..Default::default()
        };
        Stored {
            proto,
            folder: Arc::from(Path::new(".")),
            decoded: OnceLock::new(),
            head: OnceLock::new(),
            every: Some(every),
        }
    }

    /// The value of every element, if all are the same bit by bit.
    pub fn all_equal(&self) -> Option<f64> {
        if let Some(every) = &self.every {
            return every.scalar();
        }
        if let (Some(raw), Some(each)) = (&self.proto.raw_data, self.element()?.bytes()) {
            let first = raw.get(..each)?;
            return raw
                .chunks(each)
                .all(|x| x == first)
                .then(|| Tensor::new(&[], of_raw(self.element()?, first)).scalar())?;
        }
        let values = self.tensor().ok()?.to_f64()?;
        let first = *values.first()?;
        let same = |v: &f64| v.to_bits() == first.to_bits();
        values.iter().all(same).then_some(first)
    }

    /// The message as it is stored.
    pub fn proto(&self) -> &TensorProto {
        &self.proto
    }

    /// Gives back what the file is to store.
    pub fn into_proto(self) -> TensorProto {
        self.proto
    }

    /// Element type; `None` if nothing is computed with it.
    pub fn element(&self) -> Option<Element> {
        Element::of_number(self.proto.data_type)
    }

    /// Sizes, outermost first; `None` if a size is negative or their product does not fit in memory.
    pub fn shape(&self) -> Option<Vec<usize>> {
        sizes(&self.proto.dims).ok().map(|(shape, _)| shape)
    }

    /// Number of elements, 0 where [`Stored::shape`] is `None`.
    pub fn len(&self) -> usize {
        sizes(&self.proto.dims).map_or(0, |(_, n)| n)
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of its elements.
    pub fn n_bytes(&self) -> usize {
        match (self.element().and_then(Element::bytes), &self.every) {
            (Some(each), _) => each.saturating_mul(self.len()),
            (None, Some(every)) => every.n_bytes().saturating_mul(self.len()),
            (None, None) => self.proto.string_data.iter().map(Bytes::len).sum(),
        }
    }

    /// Its elements.
    ///
    /// # Errors
    /// A sentence: damaged, of a type nothing is computed with, or its external data cannot be read.
    pub fn tensor(&self) -> Result<Tensor, String> {
        if let Some(tensor) = self.decoded.get() {
            return Ok(tensor.clone());
        }
        let tensor = match &self.every {
            Some(every) => {
                let (shape, n) = sizes(&self.proto.dims)?;
                // A few bytes can claim any number of elements.
                if n.saturating_mul(every.n_bytes_in_memory()) > ALWAYS {
                    return Err(format!("its {n} elements are too many to write out"));
                }
                Tensor::new(&shape, every.values.pick(std::iter::repeat_n(0, n)))
            }
            None => decode(&self.proto, &self.folder)?,
        };
        if tensor.len() <= KEPT_ELEMENTS {
            return Ok(self.decoded.get_or_init(|| tensor).clone());
        }
        Ok(tensor)
    }

    /// Whether type, sizes and elements are the same bit by bit. Reads no more of elements in other files than is
    /// needed to tell them apart.
    pub fn same_elements(&self, other: &Stored) -> bool {
        let (a, b) = (&self.proto, &other.proto);
        if (a.data_type, &a.dims) != (b.data_type, &b.dims) {
            return false;
        }
        if let (Some(a), Some(b)) = (&a.raw_data, &b.raw_data) {
            return a == b;
        }
        if let (Some((a, head)), Some((b, other))) = (self.head(), other.head()) {
            return a == b || (head == other && a.same_bytes(b).is_ok_and(|same| same));
        }
        matches!((self.tensor(), other.tensor()), (Ok(a), Ok(b)) if a.same_bits(&b))
    }

    /// Where elements in another file are, and the first of their bytes.
    fn head(&self) -> Option<&(External, Vec<u8>)> {
        let read = || {
            let external = self.external().ok()??;
            let mut head = vec![0; HEAD.min(external.length) as usize];
            external.open().ok()?.read_exact(&mut head).ok()?;
            Some((external, head))
        };
        self.head.get_or_init(read).as_ref()
    }

    /// Where its elements are, if they are in another file.
    ///
    /// # Errors
    /// A sentence: the location is missing, leaves the folder, or is too short.
    pub fn external(&self) -> Result<Option<External>, String> {
        External::new(&self.proto, &self.folder)
    }
}

/// The elements of a tensor wherever they are; external data is looked for in `folder`.
///
/// # Errors
/// As [`Stored::tensor`].
pub fn decode(proto: &TensorProto, folder: &Path) -> Result<Tensor, String> {
    let Some(external) = External::new(proto, folder)? else {
        return Tensor::of_proto(proto);
    };
    let element = Element::of_number(proto.data_type)
        .ok_or_else(|| format!("element type number {} is not supported", proto.data_type))?;
    let (shape, _) = sizes(&proto.dims)?;
    let values = external
        .values(element)
        .map_err(|error| external.cannot_read(&error))?;
    Ok(Tensor::new(&shape, values))
}

/// The tensor that coordinates and elements stand for; everything else in it is zero.
///
/// # Errors
/// As [`Stored::tensor`], or a coordinate is outside.
pub fn dense(sparse: &SparseTensorProto, folder: &Path) -> Result<Tensor, String> {
    let part = |tensor: &Option<TensorProto>, what: &str| {
        let tensor = tensor
            .as_ref()
            .ok_or_else(|| format!("its {what} are missing"))?;
        decode(tensor, folder)
    };
    let (shape, n) = sizes(&sparse.dims)?;
    const MOST_ELEMENTS: usize = 1 << 25;
    if n > MOST_ELEMENTS {
        return Err(format!("its {n} elements are too many to write out"));
    }
    let (values, indices) = (
        part(&sparse.values, "values")?,
        part(&sparse.indices, "indices")?,
    );
    let given = indices.to_i64().ok_or("its indices are not integers")?;
    let rank = if indices.shape.len() == 2 {
        shape.len()
    } else {
        1
    };
    // For each position, the number of the last element given for it, or that of the zero at the end.
    let mut from = vec![values.len(); n];
    if rank == 0 || given.len() != values.len() * rank {
        return Err("it does not have coordinates for each of its values".to_string());
    }
    for (k, index) in given.chunks(rank).enumerate() {
        let at = match index {
            [linear] if rank == 1 => usize::try_from(*linear).ok(),
            index => index.iter().zip(&shape).try_fold(0usize, |at, (i, size)| {
                let i = usize::try_from(*i).ok().filter(|i| i < size)?;
                Some(at * size + i)
            }),
        };
        let place = at.and_then(|at| from.get_mut(at));
        *place.ok_or_else(|| format!("its coordinate {index:?} is outside of {shape:?}"))? = k;
    }
    let elements = same_type!(&*values.values, v => {
        from.iter().map(|k| v.get(*k).cloned().unwrap_or_default()).collect()
    });
    Ok(Tensor::new(&shape, elements))
}

/// A range of a file beside the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct External {
    /// The file.
    pub path: PathBuf,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

impl External {
    /// The range a tensor's elements are in; `None` if they are inside the model.
    ///
    /// # Errors
    /// A sentence: no location, one outside of `folder`, no such file, or fewer bytes than the shape
    /// asks for.
    pub fn new(proto: &TensorProto, folder: &Path) -> Result<Option<External>, String> {
        if proto.data_location != 1 {
            return Ok(None);
        }
        let entry = |key: &str| {
            proto
                .external_data
                .iter()
                .find(|e| e.key == key)
                .map(|e| &e.value)
        };
        let number = |key: &str| match entry(key) {
            None => Ok(None),
            Some(text) => text
                .parse::<u64>()
                .map(Some)
                .map_err(|_| format!("its external data has {key} `{text}`, which is no size")),
        };
        let location = entry("location").ok_or("its external data has no location")?;
        let path = inside(folder, location)?;
        let cannot = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
        let available = path.metadata().map_err(cannot)?.len();
        let (_, n) = sizes(&proto.dims)?;
        if proto.data_type == Element::String.number() {
            return Err("text cannot be in another file".to_string());
        }
        let each = Element::of_number(proto.data_type).and_then(Element::bytes);
        let offset = number("offset")?.unwrap_or(0);
        let length = match (number("length")?, each) {
            (Some(stored), Some(each)) if stored != (n * each) as u64 => {
                return Err(format!(
                    "it takes {} bytes, but {stored} are stored in `{location}`",
                    n * each
                ));
            }
            (Some(stored), _) => stored,
            (None, Some(each)) => (n * each) as u64,
            (None, None) => available.saturating_sub(offset),
        };
        if offset.checked_add(length).is_none_or(|end| end > available) {
            return Err(format!(
                "its {length} bytes at offset {offset} reach beyond the end of {} ({available} bytes)",
                path.display()
            ));
        }
        Ok(Some(External {
            path,
            offset,
            length,
        }))
    }

    /// Its elements.
    ///
    /// # Errors
    /// The file cannot be read or has become shorter.
    fn values(&self, element: Element) -> std::io::Result<Values> {
        let mut file = BufReader::with_capacity(1 << 20, self.open()?);
        of_parts(element, self.length as usize, |part| file.read_exact(part))
    }

    /// Whether another range holds the same bytes.
    fn same_bytes(&self, other: &External) -> std::io::Result<bool> {
        const PART: u64 = 1 << 16;
        let (mut a, mut b) = (self.open()?, other.open()?);
        let (mut part, mut its) = (vec![0; PART as usize], vec![0; PART as usize]);
        let mut left = self.length;
        while left > 0 {
            let n = left.min(PART) as usize;
            a.read_exact(&mut part[..n])?;
            b.read_exact(&mut its[..n])?;
            if part[..n] != its[..n] {
                return Ok(false);
            }
            left -= n as u64;
        }
        Ok(self.length == other.length)
    }

    /// The file, at the first of its bytes.
    fn open(&self) -> std::io::Result<File> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        Ok(file)
    }

    /// A sentence for an error of reading.
    pub fn cannot_read(&self, error: &std::io::Error) -> String {
        format!("cannot read {}: {error}", self.path.display())
    }
}

/// The file at `location` below `folder`.
fn inside(folder: &Path, location: &str) -> Result<PathBuf, String> {
    let relative = Path::new(location);
    let plain = |c: Component| matches!(c, Component::Normal(_) | Component::CurDir);
    if location.is_empty() || !relative.components().all(plain) {
        return Err(format!(
            "its external data is at `{location}`; only paths below the model's folder are read"
        ));
    }
    let path = folder.join(relative);
    let cannot = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let real = path.canonicalize().map_err(cannot)?;
    if !real.starts_with(folder.canonicalize().map_err(cannot)?) {
        return Err(format!(
            "its external data `{location}` is a link that leaves the model's folder"
        ));
    }
    Ok(real)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::StringStringEntryProto;

    /// `n` numbers at `offset` of `weights` in that folder.
    fn external(folder: &Path, offset: usize, n: usize) -> Stored {
        let entry = |key: &str, value: String| StringStringEntryProto {
            key: key.to_string(),
            value,
        };
        let proto = TensorProto {
            dims: vec![n as i64],
            data_type: Element::F32.number(),
            data_location: 1,
            external_data: vec![
                entry("location", "weights".to_string()),
                entry("offset", offset.to_string()),
            ],
            ..TensorProto::default()
        };
        Stored::new(proto, &Arc::from(folder))
    }

    #[test]
    fn strings_are_written_out_as_long_as_they_take_little_memory() {
        let every = Tensor::new(&[], Values::String(vec![Bytes::new()]));
        let few = Stored::filled(&[3], every.clone());
        assert_eq!(few.n_bytes(), 6);
        assert_eq!(
            few.tensor().expect("few").n_bytes_in_memory(),
            3 * size_of::<Bytes>()
        );
        // Empty strings take 2 bytes each in a file, which would fit.
        let many = Stored::filled(&[1 << 24], every);
        assert!(many.tensor().is_err());
    }

    #[test]
    fn elements_in_other_files_are_told_apart_wherever_they_differ() {
        const N: usize = 20_000;
        let folder = tempfile::tempdir().expect("a folder");
        let same: Vec<u8> = (0..4 * N).map(|n| (n % 251) as u8).collect();
        let changed = |at: usize| {
            let mut bytes = same.clone();
            bytes[at] ^= 1;
            bytes
        };
        let (first, middle, last) = (changed(0), changed(2 * N), changed(4 * N - 1));
        let all = [&same, &same, &first, &middle, &last].map(Vec::as_slice);
        std::fs::write(folder.path().join("weights"), all.concat()).expect("written");
        let [a, b, others @ ..] = [0, 1, 2, 3, 4].map(|k| external(folder.path(), 4 * N * k, N));
        assert!(a.same_elements(&b) && b.same_elements(&a) && a.same_elements(&a));
        assert!(!others.iter().any(|other| a.same_elements(other)));
        // The tensor as the model itself would store it.
        let tensor = b.tensor().expect("read");
        assert!(Stored::of_tensor("own", tensor).same_elements(&a));
        assert!(!a.same_elements(&external(folder.path(), 0, N - 1)));
    }
}
