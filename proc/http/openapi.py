"""The OpenAPI document of the server, made from the bodies' own types, so that it cannot differ from what is read."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from proc.http.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "an answer to a conversation, whole or as server-sent events"),
    "/v1/completions": (CompletionBody, "an answer to a text or to token ids, whole or as server-sent events"),
    "/tokenize": (TokenizeBody, "token ids of a text or of a conversation"),
    "/detokenize": (DetokenizeBody, "the text of token ids"),
}
PAGES = {
    "/v1/models": "the model",
    "/health": "whether a scheduler answers",
    "/ready": "whether new requests are taken",
    "/version": "of the server",
    "/metrics": "for Prometheus",
    "/status": "the schedulers' figures",
    "/trace": "the times of the last steps",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas, parts = msgspec.json.schema_components(
        [kind for kind, _ in BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {
        path: {"get": {"summary": words, "responses": _replies()}} for path, words in PAGES.items()
    }
    paths["/trace"]["get"]["parameters"] = [
        {"name": "last", "in": "query", "schema": {"type": "integer", "minimum": 0}, "description": "how many steps"}
    ]
    for (path, (_, words)), schema in zip(BODIES.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": words, "requestBody": body, "responses": _replies()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sidestep", "version": version("sidestep")},
        "paths": paths,
        "components": {"schemas": parts | {"Error": ERROR}},
    }


def _replies() -> dict[str, Any]:
    error = {
        "description": "see docs/HTTP.md",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return {"200": {"description": "as OpenAI's"}, "4XX": error, "5XX": error}
