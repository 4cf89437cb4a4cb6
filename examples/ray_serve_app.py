"""Several GPUs behind one address: one server per GPU, or per two GPUs, with Ray Serve in front.

    pip install 'ray[serve]'
    serve run examples.ray_serve_app:build model=DIR draft_model_path=DIR replicas=4

Run it at the root of the repository, or copy this file beside your own code. Each replica is the
whole application of `python -m cpmcu.server` on a GPU of its own, so all endpoints are there,
streams stream, and a client that leaves frees its slot. With tensor_parallel_size=2 a replica has
two GPUs of one machine. /metrics, /health and the page answer for the replica that received the
request.
"""

from typing import Any

try:
    from ray import serve

    from cpmcu.config import EngineConfig, SpeculativeConfig
except ImportError as error:
    raise SystemExit(
        f"this example needs Ray and the server ({error}): pip install 'ray[serve]' '.[server]'"
    ) from error
if __name__ == "__main__":
    raise SystemExit("run this example with: serve run examples.ray_serve_app:build model=DIR")

SLOTS = 8  # concurrent sequences of a replica


def build(arguments: dict[str, Any]) -> serve.Application:
    """`arguments`: model, draft_model_path, device ("cuda" or "cpu"), replicas,
    tensor_parallel_size."""
    known = {"model", "draft_model_path", "device", "replicas", "tensor_parallel_size"}
    unknown = arguments.keys() - known
    if unknown:
        raise ValueError(f"unknown argument {sorted(unknown)[0]!r}, see examples/ray_serve_app.py")
    device = arguments.get("device", "cuda")
    num_gpus = int(arguments.get("tensor_parallel_size", 1))
    engine = EngineConfig(
        model=arguments.get("model"),
        device=device,  # Ray shows a replica only its own GPUs
        tensor_parallel_size=num_gpus,
        max_num_seqs=SLOTS,
        speculative_config=SpeculativeConfig(draft_model_path=arguments.get("draft_model_path")),
    )

    def application() -> Any:
        """Runs in each replica before its first request."""
        from cpmcu.serving.app import create_app
        from cpmcu.serving.config import ServerConfig
        from cpmcu.serving.service import Service

        service = Service(engine, ServerConfig())
        service.load()
        return create_app(service)

    deployment = serve.deployment(
        serve.ingress(application)(),
        name="cpmcu",
        num_replicas=int(arguments.get("replicas", 1)),
        # Requests beyond the slots wait in the replica, so that no slot is idle.
        max_ongoing_requests=4 * SLOTS,
        ray_actor_options={"num_gpus": num_gpus if device == "cuda" else 0},
    )
    return deployment.bind()
