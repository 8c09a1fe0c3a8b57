//! Tables that are read, and what is said about those that cannot be.

use super::*;

const GOOD: &str = r#"{
  "format": "shorthaul products",
  "version": 1,
  "machine": {"device": "NVIDIA H200", "driver": "13.0", "cublaslt": "13.4.1"},
  "workspace_bytes": 33554432,
  "entries": [
    {
      "product": "m 8 n 8 k 8 batch 1; A f32 ld 8; B f32 ld 8; D f32 ld 8",
      "rest": "bias",
      "candidates": [
        {"kind": "own", "microseconds": 61.2},
        {"kind": "library", "rank": 1, "microseconds": 52.9}
      ]
    }
  ]
}
"#;

fn parse(text: &str) -> Result<Table, TableError> {
    Table::parse(Path::new("somewhere/table.json"), text)
}

#[test]
fn a_table_is_read() {
    let table = parse(GOOD).unwrap();
    let key = Key {
        product: "m 8 n 8 k 8 batch 1; A f32 ld 8; B f32 ld 8; D f32 ld 8".into(),
        rest: "bias".into(),
    };
    let found = table.candidates(&key);
    assert_eq!((table.len(), table.workspace_bytes), (1, 32 << 20));
    assert_eq!(
        (found[0].candidate, found[0].microseconds),
        (Candidate::Own, 61.2)
    );
    assert_eq!(found[1].candidate, Candidate::Library(1));
    let nothing = Key {
        rest: "nothing".into(),
        ..key
    };
    assert!(table.candidates(&nothing).is_empty());
}

/// Each planted fault is told with the file and its line, and with what to do.
#[test]
fn what_is_wrong_with_a_file_is_told_with_its_line() {
    let twice = GOOD.replace("\n    }\n  ]", "\n    },\n    {\"product\": \"m 8 n 8 k 8 batch 1; A f32 ld 8; B f32 ld 8; D f32 ld 8\", \"rest\": \"bias\", \"candidates\": [{\"kind\": \"own\", \"microseconds\": 1}]}\n  ]");
    for (text, line, said) in [
        (
            GOOD.replace("61.2", "-1"),
            11,
            "-1 microseconds are no time",
        ),
        (
            GOOD.replace("61.2", "\"fast\""),
            11,
            "invalid type: string \"fast\"",
        ),
        (
            GOOD.replace("\"own\", ", "\"own\", \"rank\": 0, "),
            8,
            "`own` has no `rank`",
        ),
        (
            GOOD.replace("\"rank\": 1, ", ""),
            8,
            "every other kind has one",
        ),
        (
            GOOD.replace("\"kind\": \"own\"", "\"kind\": \"cutlass\""),
            11,
            "unknown variant `cutlass`",
        ),
        (
            GOOD.replace("\"rest\"", "\"remains\""),
            9,
            "unknown field `remains`",
        ),
        (
            GOOD.replace("\"version\": 1", "\"version\": 2"),
            1,
            "version 2 of `shorthaul products`",
        ),
        (
            GOOD.replace("shorthaul products", "other"),
            1,
            "version 1 of `other`",
        ),
        (GOOD.replace("  ]\n}", "  ]"), 16, "EOF"),
        (twice, 8, "has two entries"),
    ] {
        let error = parse(&text).unwrap_err().to_string();
        let place = format!("somewhere/table.json, line {line}: ");
        assert!(
            error.starts_with(&place) && error.contains(said),
            "{said}: {error}"
        );
        assert!(error.ends_with("or leave the table out"), "{error}");
    }
    let absent = Table::read(Path::new("/nowhere/table.json")).unwrap_err();
    assert!(
        absent
            .to_string()
            .starts_with("the table of products /nowhere/table.json cannot be read")
    );
}

#[test]
fn a_table_of_another_machine_is_refused() {
    let table = parse(GOOD).unwrap();
    let told = |table: &Table, device: &str, cublaslt, cudnn| {
        let checked = table.check(device, cublaslt, cudnn);
        checked.err().map(|error| error.to_string())
    };
    let (here, newer) = (Some("13.4.1"), Some("13.5.0"));
    assert_eq!(told(&table, "NVIDIA H200", here, None), None);
    let device = told(&table, "NVIDIA A100", here, None).unwrap();
    assert!(
        device.contains("was measured on a device NVIDIA H200, but this is NVIDIA A100; measure")
    );
    let library = told(&table, "NVIDIA H200", newer, None).unwrap();
    assert!(
        library.contains("was measured on cuBLASLt 13.4.1, but this is 13.5.0"),
        "{library}"
    );
    let text = GOOD.replace("\"13.4.1\"", "\"13.4.1\", \"cudnn\": \"9.26.0\"");
    let with_cudnn = parse(&text).unwrap();
    let told = |cudnn| told(&with_cudnn, "NVIDIA H200", here, cudnn);
    assert_eq!(told(Some("9.26.0")), None);
    let newer = told(Some("9.27.0")).unwrap();
    assert!(
        newer.contains("was measured on cuDNN 9.26.0, but this is 9.27.0"),
        "{newer}"
    );
}

/// A library that is missing is not compared: the first product that needs it gives the error.
#[test]
fn a_library_that_is_not_there_is_not_compared() {
    let text = GOOD.replace("\"13.4.1\"", "\"13.4.1\", \"cudnn\": \"9.26.0\"");
    let table = parse(&text).unwrap();
    table.check("NVIDIA H200", None, None).unwrap();
    table.check("NVIDIA H200", None, Some("9.26.0")).unwrap();
    assert!(table.check("NVIDIA H200", None, Some("9.27.0")).is_err());
}
