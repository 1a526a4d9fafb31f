"""A loopback server that speaks the Tinker API of the client package (tinker 0.38) on a tiny model.

Every request is parsed and every reply is made with the client package's own types, so a field
that the wire does not have fails here. Requests of all models run one after another in one thread.
Checkpoints lie in a folder, so a server that was killed can be started again. Faults can be
injected by path. Run it: `python -m tests.tinker_server --model FOLDER --root FOLDER --port 0`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rlfe.engines.tokenizer import HfTokenizer
from tests.tinker_model import Model, weighted_loss

KEY = "tml-loopback"
PROTO = "application/x-protobuf"
NUMPY = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


@dataclass
class Fault:
    """What goes wrong at a path: an HTTP status, a pause in seconds, or death.

    `skip` requests pass before it happens `times` times. `Fault("optim_step", status=500)`
    """

    path: str
    status: int = 0
    pause: float = 0.0
    die: bool = False
    skip: int = 0
    times: int = 1


@dataclass
class Server:
    """State and answers; `start` serves it.

    reduction: "sum" as the API says; "mean" as SkyRL's JAX backend does, which reports no sums.
    told_norm: whether optim_step tells the gradient norm. gone: connections end without a reply.
    """

    model: Path
    root: Path
    reduction: str = "sum"
    told_norm: bool = True
    gone: bool = False
    name: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # paths, in order of arrival
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or str(self.model)
        self.tokenizer, self.work = HfTokenizer(self.model), queue.Queue()
        self.loaded: dict[str, Model] = {}
        self._numbers = itertools.count(1)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            name, task = self.work.get()
            try:
                self.results[name] = task()
            except Exception as error:
                self.results[name] = types.RequestFailedResponse(
                    error=repr(error), category=types.RequestErrorCategory.Server
                )

    def later(self, task: Callable[[], Any], samples: int = 0) -> types.UntypedAPIFuture:
        """The promise of a task's result; of a sampling one with an id per sample."""
        name = f"r{next(self._numbers)}"
        self.work.put((name, task))
        ids = [f"{name}-{row}" for row in range(samples)]
        return types.UntypedAPIFuture(request_id=name, sample_sequence_ids=ids or None)

    def result(self, name: str, seconds: float = 20.0) -> Any:
        until = time.monotonic() + seconds
        while name not in self.results and time.monotonic() < until:
            time.sleep(0.002)
        return self.results.get(name)

    # Each path's answer; the argument is the parsed JSON.

    def client_config(self, data: Any) -> Any:
        types.ClientConfigRequest.model_validate(data)
        return types.ClientConfigResponse()

    def create_session(self, data: Any) -> Any:
        types.CreateSessionRequest.model_validate(data)
        return types.CreateSessionResponse(session_id=f"s-{uuid.uuid4().hex[:8]}")

    def create_model(self, data: Any) -> Any:
        request = types.CreateModelRequest.model_validate(data)
        name, lora = f"{request.session_id}:train:{request.model_seq_id}", request.lora_config
        assert request.base_model == self.name

        def task() -> Any:
            self.models[name] = Model(
                self.model,
                rank=lora.rank,
                seed=lora.seed or 0,
                attention=lora.train_attn,
                mlp=lora.train_mlp,
            )
            return types.CreateModelResponse(model_id=name)

        return self.later(task)

    def get_info(self, data: Any) -> Any:
        request = types.GetInfoRequest.model_validate(data)
        facts = types.ModelData(model_name=self.name)
        return types.GetInfoResponse(model_data=facts, model_id=request.model_id)

    def optim_step(self, data: Any) -> Any:
        request = types.OptimStepRequest.model_validate(data)

        def task() -> Any:
            norm = self.models[request.model_id].step(request.optim_params)
            told = {"grad_norm": norm} if self.told_norm else None
            return types.OptimStepResponse(metrics=told)

        return self.later(task)

    def save_weights(self, data: Any) -> Any:
        request = types.SaveWeightsRequest.model_validate(data)
        path = f"tinker://{request.model_id}/weights/{request.path}"
        return self.later(lambda: self._saved(request.model_id, path, optimizer=True))

    def save_weights_for_sampler(self, data: Any) -> Any:
        request = types.SaveWeightsForSamplerRequest.model_validate(data)
        path = f"tinker://{request.model_id}/sampler_weights/{request.path}"
        return self.later(lambda: self._saved(request.model_id, path, optimizer=False))

    def _saved(self, name: str, path: str, *, optimizer: bool) -> Any:
        self.models[name].save(self.place(path), optimizer=optimizer)
        if optimizer:
            return types.SaveWeightsResponse(path=path)
        return types.SaveWeightsForSamplerResponse(path=path)

    def save_weights_external(self, data: Any) -> Any:
        request = types.SaveWeightsExternalRequest.model_validate(data)
        path = f"tinker://{request.model_id}/external_weights/{request.path}"

        def task() -> Any:
            self.models[request.model_id].save_adapter(self.place(path))
            return types.SaveWeightsExternalResponse(path=path)

        return self.later(task)

    def load_weights(self, data: Any) -> Any:
        request = types.LoadWeightsRequest.model_validate(data)
        name = f"{request.session_id}:train:{request.model_seq_id}"

        def task() -> Any:
            self.models[name] = Model.load(self.model, self.place(request.path))
            return types.LoadWeightsResponse(path=request.path)

        return self.later(task)

    def create_sampling_session(self, data: Any) -> Any:
        request = types.CreateSamplingSessionRequest.model_validate(data)
        if request.model_path and not self.place(request.model_path).is_dir():
            raise Refused(404, f"no such checkpoint: {request.model_path}")
        name = f"{request.session_id}-sample-{request.sampling_session_seq_id}"
        self.samplers[name] = (request.model_path, self.name)
        return types.CreateSamplingSessionResponse(sampling_session_id=name)

    def asample(self, data: Any) -> Any:
        request = types.SampleRequest.model_validate(data)
        path, params = self.samplers[request.sampling_session_id][0], request.sampling_params

        def task() -> Any:
            model, prompt = self._sampler(path), request.prompt.to_ints()
            reply = pb.SampleResponse()
            for row in range(request.num_samples):
                tokens, logprobs, stopped = model.sample(
                    prompt, params, (params.seed or 0) + row, self.tokenizer.decode
                )
                reply.sequences.add(
                    stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
                    tokens=np.array(tokens, np.int32).tobytes(),
                    logprobs=np.array(logprobs, np.float32).tobytes(),
                )
            if request.prompt_logprobs:
                with torch.no_grad():
                    scores = model.logprobs(prompt[:-1], prompt[1:]).numpy()
                reply.prompt_logprobs = np.array([np.nan, *scores], np.float32).tobytes()
            return reply

        return self.later(task, samples=request.num_samples)

    def _sampler(self, path: str | None) -> Model:
        if path not in self.loaded:
            if path is None:
                plain = {"rank": 1, "seed": 0, "attention": True, "mlp": False}
                self.loaded[path] = Model(self.model, **plain)  # B is 0: the base model
            else:
                self.loaded[path] = Model.load(self.model, self.place(path))
        return self.loaded[path]

    def forward_backward(self, body: bytes) -> Any:
        request = pb.ForwardBackwardRequest()
        request.ParseFromString(body)

        def task() -> Any:
            model, outputs, total = self.models[request.model_id], [], 0.0
            losses = []
            for datum in request.data:
                ids = np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32).tolist()
                inputs = {name: _tensor(value) for name, value in datum.loss_fn_inputs.items()}
                logp = model.logprobs(ids, inputs["target_tokens"].tolist())
                loss = weighted_loss(request.loss_fn, logp, inputs).sum()
                if self.reduction == "mean":  # by the sum of weights, which default to ones
                    weights = inputs.get("weights", torch.ones(len(ids))).sum()
                    loss = loss / weights.clamp(min=1e-9) / len(request.data)
                losses.append(loss)
                total += float(loss.detach())
                outputs.append(logp.detach().numpy().astype(np.float32))
            if not request.forward_only:
                sum(losses).backward()
            return _forward_backward_output(outputs, total if self.reduction == "sum" else None)

        return self.later(task)

    def retrieve_future(self, data: Any) -> Any:
        request = types.FutureRetrieveRequest.model_validate(data)
        found = self.result(request.request_id)
        if found is None:
            raise Refused(408, "still working")
        return found

    def get(self, path: str) -> Any:
        """Answers of GET paths: an object, or the bytes of a file."""
        if path == "healthz":
            return types.HealthResponse(status="ok")
        if path == "get_server_capabilities":
            model = types.SupportedModel(model_name=self.name)
            return types.GetServerCapabilitiesResponse(supported_models=[model])
        if path.startswith("samplers/"):
            held, base = self.samplers[path.removeprefix("samplers/")]
            name = path.removeprefix("samplers/")
            return types.GetSamplerResponse(sampler_id=name, base_model=base, model_path=held)
        if path.endswith("/external_weights_urls"):
            _, run, _, kind, name, _ = path.split("/")
            folder = self.place(f"tinker://{run}/{kind}/{name}")
            urls = {f.name: f"{self.url}/api/v1/files/{run}/{f.name}" for f in folder.iterdir()}
            self.files = {f"files/{run}/{f.name}": f for f in folder.iterdir()}
            return types.ExternalWeightsUrlsResponse(urls=urls, expires="2100-01-01T00:00:00Z")
        if path in self.files:
            return self.files[path].read_bytes()
        raise Refused(404, f"no such path: {path}")

    def place(self, path: str) -> Path:
        return self.root / path.removeprefix("tinker://").replace(":", "_")

    def fault(self, path: str) -> Fault | None:
        """The fault that hits this request, if one does."""
        for fault in self.faults:
            if fault.path == path and fault.times > 0:
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def start(self, port: int = 0) -> str:
        """Serve in the background; returns the address."""
        served = ThreadingHTTPServer(("127.0.0.1", port), type("H", (Handler,), {"server_": self}))
        served.daemon_threads = True
        self.http, self.url = served, f"http://127.0.0.1:{served.server_address[1]}"
        threading.Thread(target=served.serve_forever, daemon=True).start()
        return self.url

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Refused(Exception):
    """An HTTP status with a reason. `Refused(404, "no such checkpoint")`"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(lambda path, _: self.server_.get(path))

    def do_POST(self) -> None:
        self._serve(self._post)

    def _post(self, path: str, body: bytes) -> Any:
        server = self.server_
        if path == "forward_backward":
            return server.forward_backward(body)
        data = json.loads(body or b"{}")
        if path in ("telemetry", "session_heartbeat") or path.endswith("/finish"):
            return {"status": "accepted", "type": "session_heartbeat"}
        if path == "client/dynamic_config":
            return types.ClientDynamicConfigResponse()
        answer = getattr(server, path.replace("/", "_"), None)
        if answer is None:
            raise Refused(404, f"no such path: {path}")
        return answer(data)

    def _serve(self, answer: Callable[[str, bytes], Any]) -> None:
        path = self.path.removeprefix("/api/v1/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server_.gone:
            self.close_connection = True
            return None
        if path == self.path:  # beside the API: any web server
            return self._reply(404, b"<html>nothing here</html>", "text/html")
        self.server_.requests.append(path)
        open_paths = path in ("healthz", "client/config") or path.startswith("files/")
        if not open_paths and self.headers.get("X-API-Key") != KEY:
            return self._reply(401, b'{"detail": "invalid key"}')
        fault = self.server_.fault(path)
        if fault is not None:
            if fault.die:
                os._exit(1)
            time.sleep(fault.pause)
            if fault.status:
                return self._reply(fault.status, b'{"detail": "injected"}')
        try:
            found = answer(path, body)
        except Refused as refusal:
            status, text = refusal.args
            return self._reply(status, json.dumps({"detail": text}).encode())
        except Exception as error:
            return self._reply(422, json.dumps({"detail": repr(error)}).encode())
        return self._found(found)

    def _found(self, found: Any) -> None:
        if isinstance(found, bytes):
            return self._reply(200, found, "application/octet-stream")
        if hasattr(found, "SerializeToString"):
            assert PROTO in self.headers.get("Accept", "")
            return self._reply(200, found.SerializeToString(), PROTO)
        if isinstance(found, dict):
            return self._reply(200, json.dumps(found).encode())
        return self._reply(200, found.model_dump_json(exclude_none=True).encode())

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        with suppress(OSError):  # the other side may be gone
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _tensor(value: Any) -> torch.Tensor:
    array = np.frombuffer(value.dense, NUMPY[value.dtype]).copy()
    return torch.from_numpy(array).reshape(list(value.shape))


def _forward_backward_output(rows: list[np.ndarray], total: float | None) -> Any:
    reply = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    if total is not None:
        reply.metrics["loss:sum"] = total
    offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64)
    record = reply.loss_fn_outputs.add(num_datums=len(rows))
    record.fields["logprobs"].data = b"".join(row.tobytes() for row in rows)
    record.fields["logprobs"].offsets = offsets.tobytes()
    record.fields["logprobs"].dtype = pb.DTYPE_FLOAT32
    return reply


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "root"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--reduction", default="sum")
    parser.add_argument("--faults", default="[]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faults = [Fault(**each) for each in json.loads(given.faults)]
    server = Server(given.model, given.root, reduction=given.reduction, faults=faults)
    print(server.start(given.port), flush=True)
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
