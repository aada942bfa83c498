"""The wire codecs: bodies to validated operations, results to bytes, and the stored form of both.

Pure functions (but for `read_body`), so that heavy work can be done in a thread. What cannot be read is always a
`TinsmithError` with a 4xx status, whatever the bytes are.
"""

from app.codec.body import BodyTooLarge, BodyUnreadable, content_encoding, decompress, read_body
from app.codec.forward_backward import ParsedForwardBackward, decode_forward_backward, media_type
from app.codec.json_text import canonical_json, parse_json, parse_request
from app.codec.limits import CodecLimits
from app.codec.operations import ParsedSample, check_tokens, lora_spec, optim_step_operation, sample_operation
from app.codec.peek import peek_identity
from app.codec.results import encode_result
from app.codec.results_json import proto_result_to_json
from app.codec.stored import decode_context, decode_operation, digest, encode_operation, encode_request

__all__ = [
    "BodyTooLarge",
    "BodyUnreadable",
    "CodecLimits",
    "ParsedForwardBackward",
    "ParsedSample",
    "canonical_json",
    "check_tokens",
    "content_encoding",
    "decode_context",
    "decode_forward_backward",
    "decode_operation",
    "decompress",
    "digest",
    "encode_operation",
    "encode_request",
    "encode_result",
    "lora_spec",
    "media_type",
    "optim_step_operation",
    "parse_json",
    "parse_request",
    "peek_identity",
    "proto_result_to_json",
    "read_body",
    "sample_operation",
]
