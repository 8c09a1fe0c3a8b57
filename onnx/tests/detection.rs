//! NonMaxSuppression and RoiAlign against numbers worked out by hand.
//!
//! The standard's own cases are in `node_cases.rs`.

use onnx::evaluate::{Precision, Program, Values as Named};
use onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto,
};
use onnx::tensor::{Tensor, Values};
use std::path::Path;

fn attribute(name: &str, set: impl FnOnce(&mut AttributeProto)) -> AttributeProto {
    let mut attribute = AttributeProto {
        name: name.to_string(),
        ..Default::default()
    };
    set(&mut attribute);
    attribute
}

fn int(name: &str, i: i64) -> AttributeProto {
    attribute(name, |a| a.i = Some(i))
}

fn text(name: &str, s: &str) -> AttributeProto {
    attribute(name, |a| a.s = Some(s.to_string().into()))
}

/// What a node of that operator gives for its inputs.
fn run(
    op: &str,
    version: i64,
    attributes: Vec<AttributeProto>,
    inputs: Vec<Tensor>,
) -> Result<Tensor, String> {
    let names: Vec<String> = (0..inputs.len()).map(|n| format!("x{n}")).collect();
    let node = NodeProto {
        op_type: op.to_string(),
        input: names.clone(),
        output: vec!["y".to_string()],
        attribute: attributes,
        ..Default::default()
    };
    let named = |name: &str| ValueInfoProto {
        name: name.to_string(),
        ..Default::default()
    };
    let model = ModelProto {
        opset_import: vec![OperatorSetIdProto {
            version,
            ..Default::default()
        }],
        graph: Some(GraphProto {
            node: vec![node],
            input: names.iter().map(|name| named(name)).collect(),
            output: vec![named("y")],
            ..Default::default()
        }),
        ..Default::default()
    };
    let program = Program::new(&model, Path::new("."), Precision::AsStored).expect("a graph");
    let feeds: Named = names.into_iter().zip(inputs).collect();
    let outputs = program.outputs(&feeds).map_err(|error| error.to_string());
    outputs.map(|mut outputs| outputs.remove(0))
}

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::new(shape, Values::F32(values.to_vec()))
}

/// A box, one that covers half of it with its corners exchanged, and one far away.
const BOXES: [f32; 12] = [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 1.0, 5.0, 5.0, 6.0, 6.0];

/// The boxes that are chosen with these scores, at most `most`, by overlap and by score.
fn chosen(scores: &[f32], most: i64, overlap: f32, score: Option<f32>) -> Vec<i64> {
    let mut inputs = vec![
        floats(&[1, 3, 4], &BOXES),
        floats(&[1, scores.len() / 3, 3], scores),
        Tensor::ints(&[most]),
        floats(&[], &[overlap]),
    ];
    inputs.extend(score.map(|score| floats(&[1], &[score])));
    let found = run("NonMaxSuppression", 11, vec![], inputs).expect("it runs");
    assert_eq!(found.shape[1], 3);
    let rows = found.to_i64().expect("integers");
    assert!(rows.chunks(3).all(|row| row[0] == 0));
    rows.chunks(3).flat_map(|row| row[1..].to_vec()).collect()
}

#[test]
fn boxes_that_overlap_more_than_the_threshold_are_left_out() {
    let scores = [0.9, 0.8, 0.7];
    assert_eq!(chosen(&scores, 9, 0.4, None), [0, 0, 0, 2]);
    // The common area is half of what both cover: not more than the threshold.
    assert_eq!(chosen(&scores, 9, 0.5, None), [0, 0, 0, 1, 0, 2]);
}

#[test]
fn the_best_boxes_of_each_class_come_first() {
    // Of equal scores the first one.
    assert_eq!(chosen(&[0.1, 0.8, 0.8], 1, 0.5, None), [0, 1]);
    let two_classes = [0.1, 0.2, 0.3, 0.9, 0.5, 0.4];
    assert_eq!(chosen(&two_classes, 1, 0.5, None), [0, 2, 1, 0]);
    assert_eq!(chosen(&two_classes, 9, 0.5, Some(0.4)), [1, 0, 1, 1]);
    assert!(chosen(&two_classes, 0, 0.5, None).is_empty());
}

#[test]
fn boxes_may_be_given_by_their_centers() {
    // Columns 0 to 2 and 1 to 3 of the same rows have a third in common; as corners they would be flat.
    let boxes = floats(&[1, 2, 4], &[1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 2.0, 2.0]);
    let found = |overlap: f32, centered: i64| {
        let inputs = vec![
            boxes.clone(),
            floats(&[1, 1, 2], &[0.5, 0.6]),
            Tensor::ints(&[9]),
            floats(&[], &[overlap]),
        ];
        let attributes = vec![int("center_point_box", centered)];
        let found = run("NonMaxSuppression", 11, attributes, inputs)?;
        Ok::<_, String>(found.to_i64().expect("integers"))
    };
    assert_eq!(found(0.3, 1), Ok(vec![0, 0, 1]));
    assert_eq!(found(0.34, 1), Ok(vec![0, 0, 1, 0, 0, 0]));
    assert_eq!(found(0.3, 0), Ok(vec![0, 0, 1, 0, 0, 0]));
    let refused = found(1.5, 1).expect_err("no threshold");
    assert!(refused.contains("not between 0 and 1"), "{refused}");
    assert!(found(0.5, 2).is_err_and(|e| e.contains("not 0 or 1")));
}

/// An image whose elements are `4·row + column`, and what RoiAlign makes of regions of it.
fn aligned(
    version: i64,
    attributes: Vec<AttributeProto>,
    regions: &[f32],
) -> Result<Vec<f64>, String> {
    let image: Vec<f32> = (0..16u8).map(f32::from).collect();
    let n = regions.len() / 4;
    let inputs = vec![
        floats(&[1, 1, 4, 4], &image),
        floats(&[n, 4], regions),
        Tensor::ints(&vec![0; n]),
    ];
    run("RoiAlign", version, attributes, inputs).map(|y| y.to_f64().expect("floats"))
}

fn two_by_two() -> Vec<AttributeProto> {
    vec![int("output_height", 2), int("output_width", 2)]
}

#[test]
fn regions_are_sampled_at_the_centers_of_their_parts() {
    // Samples at 0 and 1, 2 and 3 of both dimensions.
    let whole = [0.0, 0.0, 4.0, 4.0];
    let found = aligned(16, two_by_two(), &whole);
    assert_eq!(found, Ok(vec![2.5, 4.5, 10.5, 12.5]));
    // Half an element further; what is beyond the last element is the last element.
    let found = aligned(10, two_by_two(), &whole);
    assert_eq!(found, Ok(vec![5.0, 6.75, 12.0, 13.75]));
    let mut attributes = two_by_two();
    attributes.push(text("coordinate_transformation_mode", "output_half_pixel"));
    let found = aligned(16, attributes, &whole);
    assert_eq!(found, Ok(vec![5.0, 6.75, 12.0, 13.75]));
}

#[test]
fn regions_are_scaled_and_empty_outside_of_the_image() {
    let mut attributes = two_by_two();
    attributes.push(attribute("spatial_scale", |a| a.f = Some(0.5)));
    let found = aligned(16, attributes, &[0.0, 0.0, 8.0, 8.0]);
    assert_eq!(found, Ok(vec![2.5, 4.5, 10.5, 12.5]));
    let found = aligned(16, two_by_two(), &[-9.0, -9.0, -7.0, -7.0]);
    assert_eq!(found, Ok(vec![0.0; 4]));
    // A region that ends before it starts has no samples; without the shift it has one element.
    let backwards = [3.0, 3.0, 1.0, 1.0];
    assert_eq!(aligned(16, vec![], &backwards), Ok(vec![0.0]));
    assert_eq!(aligned(10, vec![], &backwards), Ok(vec![15.0]));
}

#[test]
fn the_largest_weighted_element_around_a_sample_is_its_maximum() {
    let attributes = vec![text("mode", "max"), int("sampling_ratio", 1)];
    // One sample between the elements 0, 1, 4 and 5.
    let found = aligned(16, attributes, &[0.0, 0.0, 2.0, 2.0]);
    assert_eq!(found, Ok(vec![1.25]));
}

#[test]
fn regions_that_make_no_sense_are_refused() {
    let refused = |attributes: Vec<AttributeProto>, region: [f32; 4]| {
        aligned(16, attributes, &region).expect_err("refused")
    };
    let whole = [0.0, 0.0, 4.0, 4.0];
    let endless = refused(vec![], [0.0, 0.0, f32::INFINITY, 1.0]);
    assert!(endless.contains("must be finite"), "{endless}");
    let far = refused(vec![], [0.0, 0.0, 1e9, 1.0]);
    assert!(far.contains("too many"), "{far}");
    let none = refused(vec![int("output_height", 0)], whole);
    assert!(none.contains("output_height is 0"), "{none}");
    let mode = refused(vec![text("mode", "sum")], whole);
    assert!(mode.contains("`sum` is not known"), "{mode}");
    let other = run(
        "RoiAlign",
        16,
        vec![],
        vec![
            floats(&[1, 1, 2, 2], &[0.0; 4]),
            floats(&[1, 4], &whole),
            Tensor::ints(&[1]),
        ],
    );
    assert!(other.is_err_and(|e| e.contains("no image among 1")));
}
