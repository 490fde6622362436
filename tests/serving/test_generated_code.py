"""The committed protobuf code matches the proto, and the proto has all promised fields."""

from pathlib import Path

import pytest
from google.protobuf import descriptor
from grpc_tools import protoc

from serving.grpc import generate_pb2 as pb

ROOT = Path(__file__).parents[2]
GENERATED = ("generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    """A folder with newly generated code."""
    folder = tmp_path_factory.mktemp("generated")
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT}", *outputs, "serving/grpc/generate.proto"]) == 0
    return folder / "serving" / "grpc"


@pytest.mark.parametrize("name", GENERATED)
def test_committed_code_is_what_the_proto_generates(fresh: Path, name: str):
    committed = (ROOT / "serving" / "grpc" / name).read_text()
    assert committed == (fresh / name).read_text(), (
        "generate.proto has changed: its first comment says how to regenerate"
    )


def test_every_call_is_there():
    calls = {
        f"{service.name}.{method.name}": (
            method.input_type.name,
            method.output_type.name,
            method.server_streaming,
        )
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert calls == {
        "GenerateService.Generate": ("GenerateRequest", "GenerateResponse", True),
        "GenerateService.Tokenize": ("TokenizeRequest", "TokenizeResponse", False),
        "GenerateService.Detokenize": ("DetokenizeRequest", "DetokenizeResponse", False),
        "ModelService.GetModel": ("GetModelRequest", "GetModelResponse", False),
        "AdminService.GetStats": ("GetStatsRequest", "GetStatsResponse", False),
        "AdminService.Drain": ("DrainRequest", "DrainResponse", False),
    }


def test_unset_differs_from_zero_for_every_scalar_with_another_default():
    fields = pb.SamplingParams.DESCRIPTOR.fields
    scalars = [
        field
        for field in fields
        if not field.is_repeated and field.name not in ("n", "ignore_eos", "include_stop_string")
    ]
    assert len(scalars) == 14  # and the message of the form
    assert all(field.has_presence for field in scalars)
    assert all(isinstance(field, descriptor.FieldDescriptor) for field in scalars)
