"""Prints the standard's operator schemas as the table `onnx/src/check/schemas.txt`.

    python onnx/schemas.py > onnx/src/check/schemas.txt

`# …`            what made the table
`types N …`      set N of tensor element types
`operator …`     domain (`-` for the standard's), name, first version; then `deprecated` if it is,
                 or `open` if it may have attributes of any name
`in`, `out`      name:type of each; after it `?` for an optional one, `*N` for one that stands for
                 any number of values of one type, at least N, and `~N` the same, of any types
`has`            name:type of each attribute; `!` after a required one
`is`             name:set of each type variable

A type is a variable, an element type, or `-` where it is no tensor.
"""

import re

import onnx
from onnx import checker, defs, helper

DOMAINS = {"": "-", "ai.onnx.ml": "ai.onnx.ml"}
OPTION = defs.OpSchema.FormalParameterOption
TENSOR = re.compile(r"tensor\((\w+)\)")


def ports(formal, least, variables):
    """Inputs or outputs, of which at least `least` have to be given."""
    words = []
    for at, port in enumerate(formal):
        tensor = TENSOR.fullmatch(port.type_str)
        kind = tensor[1] if tensor else port.type_str if port.type_str in variables else "-"
        mark = ""
        if port.option == OPTION.Optional:
            mark = "?"
        elif port.option == OPTION.Variadic:
            mark = ("*" if port.is_homogeneous else "~") + str(max(least - at, 0))
        words.append(f"{port.name}:{kind}{mark}")
    return words


def attributes(schema):
    """Attributes in the order of their names."""
    for name in sorted(schema.attributes):
        attribute = schema.attributes[name]
        kind = str(attribute.type).rpartition(".")[2].lower()
        yield f"{name}:{kind}{'!' if attribute.required else ''}"


def is_open(schema):
    """Whether the checker lets an attribute pass that the schema does not name."""
    values = [["v"] * n for n in (schema.min_input, schema.min_output)]
    node = helper.make_node(schema.name, *values, domain=schema.domain, unheard_of=1)
    context = checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {schema.domain: schema.since_version}
    try:
        checker.check_node(node, context)
    except checker.ValidationError as error:
        return "attribute: unheard_of" not in str(error)
    return True


def main() -> None:
    schemas = [s for s in defs.get_all_schemas_with_history() if s.domain in DOMAINS]
    schemas.sort(key=lambda s: (s.domain, s.name, s.since_version))
    sets: dict[str, int] = {}
    lines = []
    for schema in schemas:
        variables = {}
        for constraint in schema.type_constraints:
            elements = [TENSOR.fullmatch(t) for t in constraint.allowed_type_strs]
            text = " ".join(sorted(e[1] for e in elements if e))
            if text:
                variables[constraint.type_param_str] = sets.setdefault(text, len(sets))
        head = f"operator {DOMAINS[schema.domain]} {schema.name} {schema.since_version}"
        mark = " deprecated" if schema.deprecated else " open" * is_open(schema)
        lines.append(head + mark)
        parts = {
            "in": ports(schema.inputs, schema.min_input, variables),
            "out": ports(schema.outputs, schema.min_output, variables),
            "has": list(attributes(schema)),
            "is": [f"{name}:{n}" for name, n in variables.items()],
        }
        lines += [" ".join([key, *words]) for key, words in parts.items() if words]
    command = "python onnx/schemas.py > onnx/src/check/schemas.txt"
    print(f"# Made by `{command}`, onnx {onnx.__version__}")
    for text, n in sets.items():
        print(f"types {n} {text}".rstrip())
    print("\n".join(lines))


if __name__ == "__main__":
    main()
