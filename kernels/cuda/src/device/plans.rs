//! cuDNN's plans for a convolution: which engines are taken, and their ranks.
//!
//! Owns what was found out about the plans of a description. Making a plan may take seconds. So one is made
//! when a rank is first asked for and when a program is loaded; plans that are known are counted, not made again.

use super::cublaslt::Complaint;
use super::cudnn::{Attribute, Cudnn, Descriptor, HeuristicMode, Int, Kind, NumericalNote, State};
use crate::vendor::Convolution;
use cudarc::cudnn::sys;
use std::collections::BTreeMap;
use std::sync::Arc;
use sys::cudnnBackendHeurMode_t as Mode;
use sys::cudnnBackendNumericalNote_t as Note;

/// How the library is asked for engines: first for those that it recommends, then for those that it falls
/// back to.
const MODES: [Mode; 2] = [Mode::CUDNN_HEUR_MODE_A, Mode::CUDNN_HEUR_MODE_FALLBACK];

/// What plans are made for.
#[derive(Clone, Copy)]
pub(super) enum PlanDevice<'a> {
    /// The device of a session.
    Session(&'a State),
    /// One that is described.
    #[cfg(test)]
    Properties(&'a Descriptor),
}

/// The attributes that name the device of a plan, where there are such.
pub(super) struct Handed {
    pub(super) handle: Option<Attribute>,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a session is named by its handle")
    )]
    pub(super) properties: Option<Attribute>,
}

impl PlanDevice<'_> {
    pub(super) fn hand(self, descriptor: &mut Descriptor, handed: Handed) -> Result<(), Complaint> {
        match self {
            PlanDevice::Session(state) => match handed.handle {
                Some(attribute) => state.set_handle(descriptor, attribute),
                None => Ok(()),
            },
            #[cfg(test)]
            PlanDevice::Properties(device) => match handed.properties {
                Some(attribute) => descriptor.set_descriptors(attribute, &[device]),
                None => Ok(()),
            },
        }
    }
}

/// Rankings by convolution and bytes of workspace.
pub(super) type Rankings = BTreeMap<(Convolution, usize), Ranking>;

/// The engines that are taken for a convolution, the best first, as far as they are known.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranking {
    taken: Vec<Spot>,
    /// Where the search goes on.
    next: Spot,
    /// The library's last complaint.
    complaint: Option<Complaint>,
}

/// An engine's place among the library's answers.
#[derive(Clone, Copy, Debug, Default)]
struct Spot {
    /// Position in [`MODES`].
    mode: usize,
    choice: usize,
}

impl Ranking {
    /// Whether `most` plans are known, or there are no more.
    pub(super) fn is_known(&self, most: usize) -> bool {
        self.taken.len() >= most || self.next.mode == MODES.len()
    }

    /// How many plans are known, at most `most`.
    pub(super) fn offered(&self, most: usize) -> usize {
        self.taken.len().min(most)
    }
}

/// A plan, with the configuration of its engine, which must stay.
pub(super) struct ExecutionPlan {
    pub(super) plan: Descriptor,
    _choice: Descriptor,
}

/// What plans are asked for.
pub(super) struct Asked<'a> {
    pub(super) library: &'a Arc<Cudnn>,
    pub(super) place: PlanDevice<'a>,
    /// The convolution in the library's terms.
    pub(super) graph: &'a Descriptor,
    pub(super) convolution: &'a Convolution,
    pub(super) workspace_bytes: usize,
}

impl Asked<'_> {
    /// The plan of a rank, if there is one.
    ///
    /// # Errors
    /// The library's last complaint, if it has no plan at all.
    pub(super) fn plan(
        &self,
        ranking: &mut Ranking,
        rank: usize,
    ) -> Result<Option<ExecutionPlan>, Complaint> {
        let Some(spot) = ranking.taken.get(rank) else {
            return self.look(ranking, rank + 1);
        };
        let choice = self.choices(spot.mode)?.into_iter().nth(spot.choice);
        let choice = choice.ok_or_else(|| Complaint {
            call: "cudnnBackendGetAttribute",
            problem: "it recommends fewer engines than when it was asked before".into(),
        });
        Ok(Some(self.planned(choice?)?.0))
    }

    /// Searches in the library's order until `most` plans are known or there are no more. Leaves out plans
    /// with a larger workspace or other numbers, and those that the library cannot make for this device.
    /// Returns the plan of the last rank, if it was found now.
    ///
    /// # Errors
    /// As for [`Asked::plan`].
    pub(super) fn look(
        &self,
        ranking: &mut Ranking,
        most: usize,
    ) -> Result<Option<ExecutionPlan>, Complaint> {
        let mut last = None;
        while !ranking.is_known(most) {
            let Spot { mode, choice } = ranking.next;
            let choices = self.choices(mode).unwrap_or_else(|complaint| {
                ranking.complaint = Some(complaint);
                Vec::new()
            });
            for (n, choice) in choices.into_iter().enumerate().skip(choice) {
                ranking.next.choice = n + 1;
                if !self.is_exact(&choice)? {
                    continue;
                }
                match self.planned(choice) {
                    Ok((plan, bytes)) if bytes <= self.workspace_bytes => {
                        ranking.taken.push(Spot { mode, choice: n });
                        last = Some(plan);
                    }
                    Ok(_) => {}
                    Err(complaint) => ranking.complaint = Some(complaint),
                }
                if ranking.taken.len() == most {
                    return Ok(last);
                }
            }
            let mode = mode + 1;
            ranking.next = Spot { mode, choice: 0 };
        }
        match &ranking.complaint {
            Some(complaint) if ranking.taken.is_empty() => Err(complaint.clone()),
            _ => Ok(None),
        }
    }

    /// What the library would run the convolution by, the best first.
    fn choices(&self, mode: usize) -> Result<Vec<Descriptor>, Complaint> {
        let mut asked = Descriptor::new(self.library, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        let of = Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH;
        asked.set_descriptors(of, &[self.graph])?;
        let mode = HeuristicMode(MODES[mode] as u32);
        asked.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
        let handed = Handed {
            handle: None,
            properties: Some(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP),
        };
        self.place.hand(&mut asked, handed)?;
        let asked = asked.finalized()?;
        let results = Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        let kind = Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        asked.descriptors(results, kind, asked.count(results)?)
    }

    /// Whether an engine makes the sums that the description means, each time the same: in f32 and from
    /// the factors as they are. For f32 factors tensor cores would be TF32.
    fn is_exact(&self, choice: &Descriptor) -> Result<bool, Complaint> {
        const MOST: usize = 32;
        let kind = Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR;
        let engines = choice.descriptors(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, kind, 1)?;
        let [engine] = engines.as_slice() else {
            return Ok(false);
        };
        let notes = Attribute::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE;
        let notes: Vec<NumericalNote> = engine.get(notes, MOST)?;
        let is_half = self.convolution.x.dtype.bytes() == 2;
        Ok(notes.iter().all(|note| {
            let tensor_cores = note.0 == Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE as u32;
            tensor_cores && is_half || note.0 == Note::CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP as u32
        }))
    }

    /// A plan, and the bytes of workspace that it wants.
    fn planned(&self, choice: Descriptor) -> Result<(ExecutionPlan, usize), Complaint> {
        let kind = Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
        let mut plan = Descriptor::new(self.library, kind)?;
        let handed = Handed {
            handle: Some(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE),
            properties: Some(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP),
        };
        self.place.hand(&mut plan, handed)?;
        let config = Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
        plan.set_descriptors(config, &[&choice])?;
        let plan = plan.finalized()?;
        let bytes: Vec<Int> = plan.get(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 1)?;
        let bytes = bytes
            .first()
            .map_or(0, |n| usize::try_from(n.0).unwrap_or(usize::MAX));
        let plan = ExecutionPlan {
            plan,
            _choice: choice,
        };
        Ok((plan, bytes))
    }
}
