//! What a recipe says about kernels: which units must not share one, and what came of it.

use super::{Group, Obstacle};
use crate::decision::{Applied, Decision, Refusal};
use graph::{ContainerId, Graph, Place, Recipe, Rewrite};

/// Pairs of units that the recipe keeps apart, each by a container that it writes.
pub(super) fn forbidden(graph: &Graph, recipe: &Recipe) -> Vec<(ContainerId, ContainerId)> {
    let apart = recipe.iter().filter(|(_, take)| !take);
    apart.filter_map(|(place, _)| units(graph, place)).collect()
}

/// Whether the recipe keeps a unit of one group apart from a unit of the other.
pub(super) fn is_apart(forbidden: &[(ContainerId, ContainerId)], x: &Group, y: &Group) -> bool {
    forbidden.iter().any(|(a, b)| {
        let (in_x, in_y) = (|id| x.writes.contains(id), |id| y.writes.contains(id));
        in_x(a) && in_y(b) || in_x(b) && in_y(a)
    })
}

/// Decisions about pairs that the recipe names and that were not decided while grouping, because the two never were the
/// first members of their groups. There is one for each pair that shares a kernel, or does not, as the recipe says.
pub(super) fn settled(
    graph: &Graph,
    groups: &[Option<Group>],
    recipe: &Recipe,
    decisions: &[Decision],
) -> Vec<Decision> {
    let settle = |(place, take): (&Place, bool)| {
        if decisions.iter().any(|d| d.place == *place) {
            return None;
        }
        let (own, other) = units(graph, place)?;
        let of = |id| groups.iter().flatten().find(|g| g.writes.contains(&id));
        let (own, other) = (of(own)?, of(other)?);
        let origin = |group: &Group| group.members[0].node.origin.clone();
        let is_one = std::ptr::eq(own, other);
        if is_one != take {
            return None;
        }
        let other = origin(other);
        Some(match take {
            true => Decision::applied(place.clone(), &origin(own), Applied::Joined { other }, 0),
            false => {
                let obstacle = Obstacle::ByRecipe;
                let refusal = Refusal::Apart { other, obstacle };
                Decision::refused(place.clone(), &origin(own), refusal, 0)
            }
        })
    };
    recipe.iter().filter_map(settle).collect()
}

/// The containers that name the two units of a place.
fn units(graph: &Graph, place: &Place) -> Option<(ContainerId, ContainerId)> {
    let is_pair = matches!(place.rewrite, Rewrite::Fuse | Rewrite::Epilogue);
    let other = place.other.as_ref().filter(|_| is_pair)?;
    graph.find(&place.container).zip(graph.find(other))
}
