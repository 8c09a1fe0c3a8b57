//! Contractions that cuBLASLt or cuDNN may compute: the choice, and the libraries' launches.
//!
//! Owns which candidates a contraction has and the place of the library's in a program. Never measures.

use super::finish::{self, Biased};
use super::{Lowering, MapInfo, NAME, Placed, buffers, emit_contraction, epilogue, types};
use crate::LaunchOp;
use crate::contraction::{
    EmittedContraction, Epilogue, convolution, emit_for_warpgroups, gemm, n_warpgroup_tiles,
};
use crate::vendor::{Candidate, Choice, Finish, Key, LibraryProduct, Operation};
use graph::{Node, Storage};
use kernels::cache;
use kernels::lower::LowerError;
use kernels::lowering::{Split, SplitReason, operations};
use kernels::plan::Buffer;
use kernels::recognize::Recognized;

/// The name in tables for the rest of a product that has none.
const NOTHING: &str = "nothing";

impl Lowering {
    /// Places a contraction that nothing is fused to: `own` or the library's.
    pub(super) fn alone(
        &mut self,
        node: &Node,
        found: &Recognized,
        own: EmittedContraction,
    ) -> Result<(), LowerError> {
        let (choice, operation) = self.choose(found, NOTHING, &[Finish::Nothing], None);
        let by_warpgroups = self.by_warpgroups(choice.candidate, found, None);
        let own = by_warpgroups.unwrap_or(own);
        match (choice.candidate, operation) {
            (Candidate::Library(rank), Some(operation)) => {
                let args = arguments(&operation, found);
                self.place_product(node, (operation, rank), args, choice, 0)
            }
            _ => self.place_contraction(node, own, 0, choice),
        }
    }

    /// A contraction and what is fused to it: the rest as epilogue where that is legal; else it reads
    /// the product from memory.
    pub(super) fn contraction_and_rest(
        &mut self,
        node: &Node,
        first: &Node,
        rest: &Node,
        found: &Recognized,
    ) -> Result<(), LowerError> {
        let escapes = self.graph.container(found.out).storage != Storage::Local;
        let epilogue = epilogue::of(&self.graph, rest, found, types(&self.graph, found), escapes)?;
        let reason = match epilogue {
            None => SplitReason::Elements,
            Some(epilogue) => match emit_contraction(&self.graph, found, Some(&epilogue)) {
                Ok(own) => return self.fused([node, first, rest], found, &epilogue, own),
                Err(unsupported) => match unsupported.no_fast_form() {
                    Some(reason) => SplitReason::Contraction(reason),
                    None => return self.loops(node),
                },
            },
        };
        match emit_contraction(&self.graph, found, None) {
            Ok(own) => {
                self.graph.container_mut(found.out).storage = Storage::Global;
                let map = self.program.maps.len();
                self.alone(first, found, own)?;
                self.loops(rest)?;
                self.record_split(map, Split::new([first, rest], reason));
                Ok(())
            }
            Err(_) => self.loops(node),
        }
    }

    /// A node of a contraction and a rest that can be its epilogue.
    fn fused(
        &mut self,
        [node, first, rest]: [&Node; 3],
        found: &Recognized,
        epilogue: &Epilogue,
        own: EmittedContraction,
    ) -> Result<(), LowerError> {
        let biased = match self.operation(found) {
            Ok(operation) if !epilogue.keeps_product => {
                finish::of(&self.graph, rest, found, &operation)?
            }
            _ => None,
        };
        let name = match &biased {
            Some(biased) => name(biased.finish).to_string(),
            None => digest(epilogue),
        };
        let finish = biased.as_ref().map(|biased| biased.finish);
        let (mut choice, operation) = self.choose(found, &name, finish.as_slice(), Some(epilogue));
        let by_warpgroups = self.by_warpgroups(choice.candidate, found, Some(epilogue));
        let own = by_warpgroups.unwrap_or(own);
        match (choice.candidate, operation, biased) {
            (Candidate::Library(rank), Some(operation), Some(Biased { finish, bias, out })) => {
                let mut args = arguments(&operation, found);
                args[2] = Buffer::Container(out);
                args.push(Buffer::Container(bias));
                let operation = operation.finished(finish);
                self.place_product(node, (operation, rank), args, choice, operations(rest, 1))
            }
            (Candidate::LibraryThenMap(rank), Some(operation), _) => {
                self.graph.container_mut(found.out).storage = Storage::Global;
                choice.n_maps = 2;
                let args = arguments(&operation, found);
                let map = self.program.maps.len();
                self.place_product(first, (operation, rank), args, choice, 0)?;
                self.loops(rest)?;
                let split = Split::new([first, rest], SplitReason::Library);
                self.record_split(map, split);
                Ok(())
            }
            _ => self.place_contraction(node, own, operations(rest, 1), choice),
        }
    }

    /// The operation by which a library computes a contraction: a product if it is one, else a convolution. A
    /// pointwise convolution with strides, which is a small product for each row of each image, stays a convolution.
    fn operation(&self, found: &Recognized) -> Result<Operation, String> {
        let types = types(&self.graph, found);
        let convolution = || convolution(&found.contraction, types);
        match gemm(&found.contraction, types) {
            Ok(gemm) if gemm.batch > 1 => Ok(match convolution() {
                Ok(c) if c.strides != [1, 1] => Operation::Convolution(c),
                _ => Operation::Gemm(gemm),
            }),
            Ok(gemm) => Ok(Operation::Gemm(gemm)),
            Err(no_product) => match convolution() {
                Ok(c) => Ok(Operation::Convolution(c)),
                Err(reason) => Err(format!(
                    "it is no plain product ({no_product}) and no convolution ({reason})"
                )),
            },
        }
    }

    /// The choice for a contraction, and what a library would compute. `finish` is what the library does
    /// with the sums itself, if it can do the whole rest, `epilogue` what our kernels do.
    fn choose(
        &self,
        found: &Recognized,
        rest: &str,
        finish: &[Finish],
        epilogue: Option<&Epilogue>,
    ) -> (Choice, Option<Operation>) {
        match self.operation(found) {
            Ok(operation) => {
                let finished = finish.first().map(|finish| operation.finished(*finish));
                let can = |candidate| match candidate {
                    Candidate::Own => Ok(()),
                    Candidate::Library(rank) => match &finished {
                        Some(finished) => self.products.offers(finished, rank),
                        None => Err(format!("{} has no such epilogue", operation.library())),
                    },
                    Candidate::LibraryThenMap(_) if rest == NOTHING => {
                        Err("there is no rest".to_string())
                    }
                    Candidate::LibraryThenMap(rank) => self.products.offers(&operation, rank),
                    Candidate::Warpgroup(_) => {
                        self.by_warpgroups(candidate, found, epilogue).map(drop)
                    }
                    Candidate::Attention(_) => Err("it is no attention".to_string()),
                };
                let choice = self.products.choose(Key::new(&operation, rest), &can);
                (choice, Some(operation))
            }
            Err(reason) => {
                let choice = Choice {
                    key: None,
                    candidate: Candidate::Own,
                    reason,
                    n_maps: 1,
                };
                (choice, None)
            }
        }
    }

    /// The contraction's kernels by products of warpgroups, if these are the candidate.
    ///
    /// # Errors
    /// Why they are not, or cannot be.
    fn by_warpgroups(
        &self,
        candidate: Candidate,
        found: &Recognized,
        epilogue: Option<&Epilogue>,
    ) -> Result<EmittedContraction, String> {
        let Candidate::Warpgroup(tile) = candidate else {
            return Err(format!("it is {candidate}'s"));
        };
        if tile >= n_warpgroup_tiles() {
            return Err(format!("there are {} tiles", n_warpgroup_tiles()));
        }
        let (c, types) = (&found.contraction, types(&self.graph, found));
        let emitted = emit_for_warpgroups(NAME, c, types, buffers(found), epilogue, Some(tile));
        emitted.map_err(|unsupported| unsupported.to_string())
    }

    fn place_product(
        &mut self,
        node: &Node,
        (operation, rank): (Operation, usize),
        mut args: Vec<Buffer>,
        choice: Choice,
        more_flops: u64,
    ) -> Result<(), LowerError> {
        let flops = operation.flops() + more_flops;
        let info = self.info(node, operation.path(), flops, 1)?;
        self.program.maps.push(MapInfo {
            product: Some(choice),
            ..info
        });
        let workspace_bytes = self.products.workspace_bytes();
        if workspace_bytes > 0 {
            let n = self.program.workspace_bytes.len();
            self.program.workspace_bytes.push(workspace_bytes);
            args.push(Buffer::Workspace(n));
        }
        let placed = Placed {
            work: LaunchOp::Product(self.product(operation, rank, workspace_bytes)),
            grid: 1,
            args,
            stage: node.stage,
            map: self.program.maps.len() - 1,
        };
        self.program.launches.push(placed);
        Ok(())
    }

    /// The position of a launch of this description.
    fn product(&mut self, operation: Operation, rank: usize, workspace_bytes: usize) -> usize {
        let all = &mut self.program.products;
        let is_same = |p: &LibraryProduct| p.operation == operation && p.rank == rank;
        let known = all.iter().position(is_same);
        known.unwrap_or_else(|| {
            let name = format!("sh_p{}", all.len());
            all.push(LibraryProduct::new(name, operation, rank, workspace_bytes));
            all.len() - 1
        })
    }
}

/// What is read first and second, and the result.
fn arguments(operation: &Operation, found: &Recognized) -> Vec<Buffer> {
    let (a, b) = match operation.is_swapped() {
        true => (found.b, found.a),
        false => (found.a, found.b),
    };
    [a, b, found.out].map(Buffer::Container).to_vec()
}

/// The name in tables for a rest that the library does itself.
fn name(finish: Finish) -> &'static str {
    match finish {
        Finish::Nothing => NOTHING,
        Finish::Bias => "bias",
        Finish::BiasRelu => "bias_relu",
    }
}

/// The name in tables for any other rest: equal texts compute alike.
fn digest(epilogue: &Epilogue) -> String {
    let types: Vec<String> = epilogue
        .params
        .iter()
        .map(|p| format!("{:?}", p.ty))
        .collect();
    let all = format!(
        "{} {} {}",
        epilogue.keeps_product,
        types.join(" "),
        epilogue.text
    );
    cache::Key::new(&[all])
        .to_string()
        .chars()
        .take(16)
        .collect()
}
