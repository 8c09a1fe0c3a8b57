//! What each kernel of a cubin needs of a multiprocessor, read from the ELF file itself.
//!
//! Owns the reading of `.nv.info.NAME`, `.nv.shared.NAME` and the kernels' symbols, of spills and
//! compilation times in ptxas' messages, and the gate that refuses what must not happen: spills and
//! stack frames (registers in memory), warnings of ptxas with numbers C75xx (a wgmma that waits).

use std::collections::BTreeMap;

use crate::nvrtc::Cubin;
use crate::{Arch, Kernel};

/// What one kernel needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack frame, spilled registers included.
    pub stack_bytes: u32,
    /// Bytes of a thread's registers written to the frame for want of registers.
    pub spill_store_bytes: u32,
    /// Bytes of a thread's registers read back.
    pub spill_load_bytes: u32,
    /// Bytes of shared memory declared in the text, without the dynamic pool; on Hopper with the 1024
    /// that the system keeps.
    pub static_shared_bytes: u32,
}

/// Why a kernel must not be used as it was compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// Registers in memory.
    #[error(
        "kernel {kernel} (of {origin}) has a stack frame of {bytes} bytes on {}: spilled registers \
         or an array with an index unknown at compilation",
        arch.name()
    )]
    Stack {
        /// The kernel.
        kernel: String,
        /// The part of the model it computes.
        origin: String,
        /// The architecture.
        arch: Arch,
        /// Bytes of a thread.
        bytes: u32,
    },
    /// A warning that costs speed.
    #[error("kernels {kernels} on {}: {line}", arch.name())]
    Warning {
        /// The kernel the warning names, or all of the file, with origins.
        kernels: String,
        /// The architecture.
        arch: Arch,
        /// ptxas' line.
        line: String,
    },
}

/// All that is wrong with the cubins of `kernels`, in the kernels' order; empty if nothing is.
pub fn gate(kernels: &[Kernel], cubins: &[Cubin]) -> Vec<GateError> {
    let mut errors = Vec::new();
    let mut rest = kernels;
    for cubin in cubins {
        let (own, others) = rest.split_at(cubin.resources.len().min(rest.len()));
        errors.extend(gate_one(own, cubin));
        rest = others;
    }
    errors
}

fn gate_one(kernels: &[Kernel], cubin: &Cubin) -> Vec<GateError> {
    let mut errors = Vec::new();
    for (kernel, resources) in kernels.iter().zip(&cubin.resources) {
        if resources.stack_bytes > 0 {
            errors.push(GateError::Stack {
                kernel: kernel.name.clone(),
                origin: kernel.origin.clone(),
                arch: cubin.arch,
                bytes: resources.stack_bytes,
            });
        }
    }
    for line in cubin.log.lines().filter(|line| line.contains("C75")) {
        let named: Vec<&Kernel> = kernels
            .iter()
            .filter(|kernel| line.contains(&format!("'{}'", kernel.name)))
            .collect();
        let blamed = if named.is_empty() {
            kernels.iter().collect()
        } else {
            named
        };
        let blamed: Vec<String> = blamed
            .iter()
            .map(|kernel| format!("{} (of {})", kernel.name, kernel.origin))
            .collect();
        errors.push(GateError::Warning {
            kernels: blamed.join(", "),
            arch: cubin.arch,
            line: line.trim().to_string(),
        });
    }
    errors
}

/// What ptxas tells of one kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spills {
    store_bytes: u32,
    load_bytes: u32,
}

/// Spills by kernel from ptxas' messages, and all other messages.
pub(super) fn told(log: &str) -> (BTreeMap<String, Spills>, String) {
    let mut spills = BTreeMap::new();
    let mut rest = Vec::new();
    let mut kernel = None;
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            kernel = Some(name.trim().to_string());
        } else if let Some((store_bytes, load_bytes)) = spill_bytes(line) {
            let found = Spills {
                store_bytes,
                load_bytes,
            };
            spills.extend(kernel.take().map(|name| (name, found)));
        } else if !line.starts_with("ptxas info") {
            rest.push(line);
        }
    }
    (spills, rest.join("\n").trim().to_string())
}

/// Bytes of spill stores and loads in `… 0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads`.
fn spill_bytes(line: &str) -> Option<(u32, u32)> {
    let before = |what: &str| {
        let words = line[..line.find(what)?].split_whitespace();
        words.last()?.parse().ok()
    };
    Some((
        before(" bytes spill stores")?,
        before(" bytes spill loads")?,
    ))
}

/// A section of an ELF file.
struct Section<'a> {
    kind: u32,
    size: u64,
    info: u32,
    /// Empty for sections that take no room in the file.
    bytes: &'a [u8],
}

const SYMBOL_BYTES: usize = 24;
/// Sections without bytes in the file.
const NOBITS: u32 = 8;
/// Attributes of `.nv.info` whose value is (symbol, number).
const REGISTERS: u8 = 0x2f;
const FRAME_BYTES: u8 = 0x11;
/// The format of attributes that carry their length.
const SIZED: u8 = 4;

/// The resources of `kernels`, in their order.
pub(super) fn read(
    cubin: &[u8],
    kernels: &[Kernel],
    told: &BTreeMap<String, Spills>,
) -> Result<Vec<Resources>, String> {
    let sections = sections(cubin).ok_or("it is not a 64-bit ELF file")?;
    let symbols = sections
        .get(".symtab")
        .zip(sections.get(".strtab"))
        .map(|(table, names)| symbol_names(table.bytes, names.bytes))
        .ok_or("it has no symbols")?;
    let info = sections.get(".nv.info").ok_or("it has no .nv.info")?;
    let attributes = attributes(info.bytes);
    kernels
        .iter()
        .map(|kernel| {
            let name = &kernel.name;
            let symbol = symbols
                .get(name.as_str())
                .ok_or_else(|| format!("it has no kernel {name}"))?;
            let frame = attributes.get(&(FRAME_BYTES, *symbol)).copied();
            // The count stands in the attributes, and in old formats in the section's info.
            let text = sections.get(format!(".text.{name}").as_str());
            let registers = attributes
                .get(&(REGISTERS, *symbol))
                .copied()
                .or(text.map(|section| section.info >> 24))
                .ok_or_else(|| format!("it does not tell the registers of {name}"))?;
            let shared = sections.get(format!(".nv.shared.{name}").as_str());
            let spills = told
                .get(name)
                .ok_or_else(|| format!("ptxas does not tell the spills of {name}"))?;
            Ok(Resources {
                kernel: name.clone(),
                registers,
                stack_bytes: frame
                    .ok_or_else(|| format!("it does not tell the frame of {name}"))?,
                spill_store_bytes: spills.store_bytes,
                spill_load_bytes: spills.load_bytes,
                static_shared_bytes: shared.map_or(0, |section| section.size as u32),
            })
        })
        .collect()
}

fn sections(elf: &[u8]) -> Option<BTreeMap<&str, Section<'_>>> {
    if elf.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let table = usize::try_from(number(elf, 0x28, 8)?).ok()?;
    let entry_bytes = number(elf, 0x3a, 2)? as usize;
    let n = number(elf, 0x3c, 2)? as usize;
    let names_idx = number(elf, 0x3e, 2)? as usize;
    let header = |idx: usize| elf.get(table.checked_add(idx * entry_bytes)?..);
    let bytes_of = |header: &[u8]| -> Option<&[u8]> {
        if number(header, 4, 4)? as u32 == NOBITS {
            return Some(&[]);
        }
        let start = usize::try_from(number(header, 0x18, 8)?).ok()?;
        let size = usize::try_from(number(header, 0x20, 8)?).ok()?;
        elf.get(start..start.checked_add(size)?)
    };
    let names = bytes_of(header(names_idx)?)?;
    let mut all = BTreeMap::new();
    for idx in 0..n {
        let header = header(idx)?;
        let section = Section {
            kind: number(header, 4, 4)? as u32,
            size: number(header, 0x20, 8)?,
            info: number(header, 0x2c, 4)? as u32,
            bytes: bytes_of(header)?,
        };
        // The first of a name counts; only tables of other sorts share names.
        if section.kind != 0 {
            let name = text_at(names, number(header, 0, 4)? as usize)?;
            all.entry(name).or_insert(section);
        }
    }
    Some(all)
}

fn symbol_names<'a>(table: &[u8], names: &'a [u8]) -> BTreeMap<&'a str, u32> {
    let symbols = table.chunks_exact(SYMBOL_BYTES).zip(0..);
    symbols
        .filter_map(|(symbol, idx)| {
            let name = text_at(names, number(symbol, 0, 4)? as usize)?;
            // A function.
            (symbol[4] & 0xf == 2).then_some((name, idx))
        })
        .collect()
}

/// The attributes that have a symbol and a number: (attribute, symbol) → number.
fn attributes(mut info: &[u8]) -> BTreeMap<(u8, u32), u32> {
    let mut all = BTreeMap::new();
    while let (Some(format), Some(attribute), Some(size)) =
        (info.first(), info.get(1), number(info, 2, 2))
    {
        let value_bytes = if *format == SIZED { size as usize } else { 0 };
        let value = info.get(4..4 + value_bytes).unwrap_or_default();
        if let (8, Some(symbol), Some(value)) =
            (value.len(), number(value, 0, 4), number(value, 4, 4))
        {
            all.insert((*attribute, symbol as u32), value as u32);
        }
        info = info.get(4 + value_bytes..).unwrap_or_default();
    }
    all
}

fn number(bytes: &[u8], at: usize, n: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(n)?)?;
    Some(
        bytes
            .iter()
            .rev()
            .fold(0, |all, &byte| all << 8 | u64::from(byte)),
    )
}

fn text_at(bytes: &[u8], at: usize) -> Option<&str> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_are_read_from_messages_and_warnings_kept() {
        let log = "ptxas info    : 24 bytes gmem\n\
                   ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n\
                   ptxas         .     824 bytes stack frame, 1116 bytes spill stores, 1144 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 0 barriers\n\
                   ptxas warning : (C7510) Potential Performance Loss";
        let (spills, rest) = told(log);
        let k = Spills {
            store_bytes: 1116,
            load_bytes: 1144,
        };
        assert_eq!(spills, BTreeMap::from([("k".to_string(), k)]));
        assert_eq!(rest, "ptxas warning : (C7510) Potential Performance Loss");
    }
}
