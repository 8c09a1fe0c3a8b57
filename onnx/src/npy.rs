//! Tensors in NumPy's files: `.npy`, and `.npz`, which is a zip archive of those.
//!
//! Owns NumPy's header (format versions 1 to 3). Reads either byte order and either element order;
//! writes little-endian and row-major. Never reads pickled objects.

use crate::element::Element;
use crate::tensor::{Tensor, Values, n_elements, of_raw, raw};
use bytes::Bytes;
use std::io::{Cursor, Read, Seek, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Data begins at a multiple of this.
const ALIGNMENT: usize = 64;

/// The tensor of an `.npy` file.
///
/// # Errors
/// A sentence: damaged, or elements of a type that ONNX has not.
pub fn read_npy(bytes: &[u8]) -> Result<Tensor, String> {
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or("it is not an .npy file: it does not begin with NumPy's mark")?;
    let truncated = || "it is truncated".to_string();
    let (major, rest) = rest.split_first().ok_or_else(truncated)?;
    let rest = rest.get(1..).ok_or_else(truncated)?;
    let (n, rest) = match major {
        1 => {
            let (n, rest) = rest.split_first_chunk().ok_or_else(truncated)?;
            (usize::from(u16::from_le_bytes(*n)), rest)
        }
        2 | 3 => {
            let (n, rest) = rest.split_first_chunk().ok_or_else(truncated)?;
            (u32::from_le_bytes(*n) as usize, rest)
        }
        other => return Err(format!("it is of version {other}; 1 to 3 are known")),
    };
    let header = rest.get(..n).ok_or_else(truncated)?;
    let header = std::str::from_utf8(header).map_err(|_| "its header is no text")?;
    let header = Header::parse(header)?;
    header.tensor(&rest[n..])
}

struct Header {
    kind: Kind,
    is_big_endian: bool,
    is_fortran: bool,
    shape: Vec<usize>,
}

#[derive(Clone, Copy)]
enum Kind {
    Plain(Element),
    /// UTF-32 text; the number is its capacity in characters.
    Unicode(usize),
    /// Text; the number is its capacity in bytes.
    Text(usize),
}

impl Header {
    /// Parses a header such as `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`.
    fn parse(text: &str) -> Result<Header, String> {
        let field = |key: &str| {
            let at = text
                .find(&format!("'{key}'"))
                .ok_or_else(|| format!("its header has no `{key}`"))?;
            let rest = &text[at + key.len() + 2..];
            Ok::<_, String>(rest.trim_start().trim_start_matches(':').trim_start())
        };
        let descr = field("descr")?;
        let descr = descr
            .strip_prefix('\'')
            .and_then(|d| d.split('\'').next())
            .ok_or("its elements are records, which ONNX has not")?;
        let shape = field("shape")?;
        let shape = shape
            .strip_prefix('(')
            .and_then(|s| s.split(')').next())
            .ok_or("its header has no shape")?;
        let size = |n: &str| {
            let n = n.trim().trim_end_matches('L');
            n.parse::<usize>()
                .map_err(|_| format!("`{n}` in its shape is no size"))
        };
        let sizes = shape.split(',').filter(|n| !n.trim().is_empty());
        Ok(Header {
            kind: kind(descr)?,
            is_big_endian: descr.starts_with('>'),
            is_fortran: field("fortran_order")?.starts_with("True"),
            shape: sizes.map(size).collect::<Result<_, _>>()?,
        })
    }

    fn tensor(&self, data: &[u8]) -> Result<Tensor, String> {
        let each = match self.kind {
            Kind::Plain(element) => element.bytes().unwrap_or(1),
            Kind::Unicode(n) => 4usize.checked_mul(n).ok_or("its texts are too long")?,
            Kind::Text(n) => n,
        };
        let n = n_elements(&self.shape);
        let wanted = n.and_then(|n| n.checked_mul(each));
        if wanted != Some(data.len()) {
            return Err(format!(
                "its shape {:?} does not take {} bytes",
                self.shape,
                data.len()
            ));
        }
        const MOST_EMPTY: usize = 1 << 24;
        if each == 0 && n.is_none_or(|n| n > MOST_EMPTY) {
            return Err("it has too many empty texts".to_string());
        }
        let mut data = data.to_vec();
        if self.is_big_endian && each > 0 {
            let width = if matches!(self.kind, Kind::Unicode(_)) {
                4
            } else {
                each
            };
            data.chunks_mut(width).for_each(<[u8]>::reverse);
        }
        let values = match self.kind {
            Kind::Plain(element) => of_raw(element, &data),
            Kind::Unicode(_) | Kind::Text(_) if each == 0 => {
                Values::String(vec![Bytes::new(); n.unwrap_or(0)])
            }
            Kind::Unicode(_) => Values::String(data.chunks(each).map(unicode).collect()),
            Kind::Text(_) => Values::String(data.chunks(each).map(text).collect()),
        };
        let order: Vec<usize> = match self.is_fortran {
            false => return Ok(Tensor::new(&self.shape, values)),
            true => row_major(&self.shape),
        };
        Ok(Tensor::new(&self.shape, values.pick(order.into_iter())))
    }
}

fn kind(descr: &str) -> Result<Kind, String> {
    let plain = descr.trim_start_matches(['<', '>', '|', '=']);
    let element = match plain {
        "f4" => Element::F32,
        "f8" => Element::F64,
        "f2" => Element::F16,
        "i1" => Element::I8,
        "i2" => Element::I16,
        "i4" => Element::I32,
        "i8" => Element::I64,
        "u1" => Element::U8,
        "u2" => Element::U16,
        "u4" => Element::U32,
        "u8" => Element::U64,
        "b1" => Element::Bool,
        other => {
            let length = |n: &str| n.parse().ok();
            let text = other.strip_prefix('U').and_then(length).map(Kind::Unicode);
            let text = text.or_else(|| other.strip_prefix('S').and_then(length).map(Kind::Text));
            return text
                .ok_or_else(|| format!("its element type `{descr}` does not exist in ONNX"));
        }
    };
    Ok(Kind::Plain(element))
}

fn unicode(utf32: &[u8]) -> Bytes {
    let codes = utf32
        .as_chunks::<4>()
        .0
        .iter()
        .map(|c| u32::from_le_bytes(*c));
    let text: String = codes
        .take_while(|c| *c != 0)
        .filter_map(char::from_u32)
        .collect();
    Bytes::from(text)
}

fn text(padded: &[u8]) -> Bytes {
    let end = padded.iter().rposition(|b| *b != 0).map_or(0, |n| n + 1);
    Bytes::copy_from_slice(&padded[..end])
}

/// The position in column-major order of each element in row-major order.
fn row_major(shape: &[usize]) -> Vec<usize> {
    let n: usize = shape.iter().product();
    let position = |at: usize| {
        let (mut rest, mut found) = (at, 0);
        for (d, size) in shape.iter().enumerate().rev() {
            let stride: usize = shape[..d].iter().product();
            found += (rest % size) * stride;
            rest /= size;
        }
        found
    };
    (0..n).map(position).collect()
}

/// The arrays of an `.npz` file, in its order.
///
/// # Errors
/// A sentence that names the array.
pub fn read_npz(bytes: &[u8]) -> Result<Vec<(String, Tensor)>, String> {
    let mut archive = ZipArchive::new(Cursor::new(bytes))
        .map_err(|error| format!("it is not an .npz file: {error}"))?;
    let mut found = Vec::new();
    for n in 0..archive.len() {
        let mut entry = archive.by_index(n).map_err(|error| error.to_string())?;
        let name = entry.name().map_err(|error| error.to_string())?;
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_string();
        let mut bytes = Vec::new();
        let read = entry.read_to_end(&mut bytes);
        read.map_err(|error| format!("the array `{name}` cannot be read: {error}"))?;
        let tensor = read_npy(&bytes).map_err(|what| format!("the array `{name}`: {what}"))?;
        found.push((name, tensor));
    }
    Ok(found)
}

/// The bytes of an `.npy` file. NumPy has no bfloat16: its elements are written as float32, exactly.
///
/// # Errors
/// A sentence: text with a character that is none of Unicode's.
pub fn npy(tensor: &Tensor) -> Result<Vec<u8>, String> {
    let (descr, data) = match &*tensor.values {
        Values::String(texts) => utf32(texts)?,
        Values::BF16(v) => {
            let wide = v.iter().map(|x| x.to_f32()).collect();
            ("<f4".to_string(), raw(&Values::F32(wide)))
        }
        values => (descr(values.element()).to_string(), raw(values)),
    };
    let sizes: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
    let comma = if sizes.len() == 1 { "," } else { "" };
    let mut header = format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}{comma}), }}",
        sizes.join(", ")
    );
    // Mark, version and length take 10 bytes, the line's end one.
    let end = (10 + header.len() + 1).next_multiple_of(ALIGNMENT);
    header.push_str(&" ".repeat(end - 10 - header.len() - 1));
    header.push('\n');
    let n = u16::try_from(header.len()).map_err(|_| "it has too many dimensions")?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(&n.to_le_bytes());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&data);
    Ok(bytes)
}

fn descr(element: Element) -> &'static str {
    match element {
        Element::F32 | Element::BF16 => "<f4",
        Element::F64 => "<f8",
        Element::F16 => "<f2",
        Element::I8 => "|i1",
        Element::I16 => "<i2",
        Element::I32 => "<i4",
        Element::I64 => "<i8",
        Element::U8 => "|u1",
        Element::U16 => "<u2",
        Element::U32 => "<u4",
        Element::U64 => "<u8",
        Element::Bool => "|b1",
        Element::String => "|S",
    }
}

fn utf32(texts: &[Bytes]) -> Result<(String, Vec<u8>), String> {
    let text = |b: &Bytes| {
        let text = std::str::from_utf8(b).map_err(|_| "its text is not UTF-8".to_string())?;
        Ok::<Vec<char>, String>(text.chars().collect())
    };
    let texts: Vec<Vec<char>> = texts.iter().map(text).collect::<Result<_, _>>()?;
    let width = texts.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let mut data = Vec::with_capacity(4 * width * texts.len());
    for text in &texts {
        for n in 0..width {
            let code = text.get(n).map_or(0, |c| u32::from(*c));
            data.extend_from_slice(&code.to_le_bytes());
        }
    }
    Ok((format!("<U{width}"), data))
}

/// Writes an `.npz` file. The same arrays give the same bytes.
///
/// # Errors
/// A sentence that names the array, or says why nothing can be written.
pub fn write_npz<'t>(
    arrays: impl IntoIterator<Item = (&'t str, &'t Tensor)>,
    out: impl Write + Seek,
) -> Result<(), String> {
    let mut archive = ZipWriter::new(out);
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .large_file(true);
    for (name, tensor) in arrays {
        let bytes = npy(tensor).map_err(|what| format!("the array `{name}`: {what}"))?;
        archive
            .start_file(format!("{name}.npy"), options)
            .map_err(|error| error.to_string())?;
        archive
            .write_all(&bytes)
            .map_err(|error| error.to_string())?;
    }
    archive.finish().map_err(|error| error.to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn what_is_written_is_read_again() {
        let text = |s: &str| Bytes::from(s.to_string());
        let tensors = [
            ("f32", Tensor::new(&[2, 1], Values::F32(vec![1.5, -0.0]))),
            ("scalar", Tensor::new(&[], Values::F64(vec![2.0]))),
            ("f16", Tensor::new(&[1], Values::F16(vec![f16::ONE]))),
            ("i64", Tensor::new(&[3], Values::I64(vec![-1, 0, i64::MAX]))),
            ("bool", Tensor::new(&[2], Values::Bool(vec![true, false]))),
            ("empty", Tensor::new(&[0, 4], Values::U8(Vec::new()))),
            (
                "a/text",
                Tensor::new(&[2], Values::String(vec![text("größe"), text("")])),
            ),
        ];
        let mut file = Cursor::new(Vec::new());
        write_npz(tensors.iter().map(|(n, t)| (*n, t)), &mut file).expect("written");
        let found = read_npz(&file.into_inner()).expect("read");
        let wanted: Vec<_> = tensors
            .iter()
            .map(|(n, t)| (n.to_string(), t.clone()))
            .collect();
        assert_eq!(found, wanted);
        let wide = Tensor::new(&[1], Values::BF16(vec![bf16::ONE]));
        let read = read_npy(&npy(&wide).expect("written")).expect("read");
        assert_eq!(read, Tensor::new(&[1], Values::F32(vec![1.0])));
    }

    #[test]
    fn orders_of_others_are_understood() {
        let header = |descr: &str, fortran: &str, data: &[u8]| {
            let text =
                format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': (2, 3), }}\n");
            let mut bytes = MAGIC.to_vec();
            bytes.extend_from_slice(&[2, 0]);
            bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
            bytes.extend_from_slice(data);
            read_npy(&bytes)
        };
        let big = header(">i2", "False", &[0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 1, 0]);
        let wanted = Tensor::new(&[2, 3], Values::I16(vec![1, 2, 3, 4, 5, 256]));
        assert_eq!(big, Ok(wanted));
        let columns = header("|u1", "True", &[1, 4, 2, 5, 3, 6]);
        let wanted = Tensor::new(&[2, 3], Values::U8(vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(columns, Ok(wanted));
        let short = header("|u1", "False", &[1, 2]).expect_err("too short");
        assert!(short.contains("does not take 2 bytes"), "{short}");
        let objects = header("|O", "False", &[]).expect_err("objects");
        assert!(objects.contains("does not exist in ONNX"), "{objects}");
        assert!(read_npy(b"PK").is_err() && read_npz(b"PK").is_err());
    }
}
