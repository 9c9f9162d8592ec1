"""What `splitserve render kuberay` needs to know beside the cluster itself."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field, model_validator

from cluster.config_section import Section
from cluster.deploy_names import DeviceResource, Labels, Name, Namespace, Taints, Variables

GIB = 2**30


class PodConfig(Section):
    """The pods of one pool."""

    workers_per_pod: int = Field(default=1, ge=1)
    """Workers of the pool in one pod, with all their ranks; with `num_gpus: 1` each rank takes one of the
    pod's GPUs."""
    cpus: int = Field(default=4, ge=1)
    """CPUs of one pod; Ray hands them out to the ranks by `num_cpus`."""
    memory: ByteSize = ByteSize(16 * GIB)
    """Memory of one pod, its /dev/shm included."""
    shm: ByteSize = ByteSize(2 * GIB)
    """Size of /dev/shm: Ray's object store, and what NIXL moves between processes of the pod."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels of the nodes that may run the pods, such as a GPU's name."""


class HeadConfig(Section):
    """The pod of Ray's head: control plane, proxy, and perhaps a router. No worker runs there."""

    cpus: int = Field(default=2, ge=1)
    """CPUs of the pod."""
    memory: ByteSize = ByteSize(8 * GIB)
    """Memory of the pod."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels of the nodes that may run the pod."""


class ModelVolume(Section):
    """Where the model is kept, mounted at /models. An init container fills it, once."""

    claim: Name | None = None
    """A PersistentVolumeClaim that exists; null: one is rendered, `<deploy.name>-models`."""
    per_pod: bool = False
    """Instead of a claim: every pod downloads into a disk of its own, which goes with it."""
    size: ByteSize = Field(default=ByteSize(100 * GIB), gt=0)
    """Of the claim that is rendered, or of each pod's disk."""
    storage_class: Name | None = None
    """Of the claim that is rendered; null: the cluster's default."""
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """Of the claim that is rendered; ReadWriteOnce is enough where all pods run on one node."""

    @model_validator(mode="after")
    def _one_place(self) -> ModelVolume:
        if self.per_pod and self.claim is not None:
            raise ValueError(f"per_pod is true, but claim is {self.claim}: set one of them")
        return self


class RdmaConfig(Section):
    """RDMA between pods; without it KV moves over TCP."""

    resource: DeviceResource | None = None
    """What the device plugin calls its devices, such as rdma/hca_shared_devices_a; null: no RDMA."""
    count: int = Field(default=1, ge=1)
    """Devices for each pod."""
    as_root: bool = True
    """Run workers as root with no capability but IPC_LOCK, which Kubernetes gives to no other user; false
    where the nodes' container runtime lets everybody lock memory (LimitMEMLOCK=infinity)."""


class KubeRay(Section):
    """A RayService on Kubernetes, which the KubeRay operator (1.5 or newer) keeps."""

    namespace: Namespace | None = None
    """Namespace of everything that is rendered; null: kubectl's."""
    share_pods: bool = False
    """Prefill and decode workers in the same pods, so that KV stays within a host: for a single machine."""
    autoscaler_idle_s: int = Field(default=600, ge=1)
    """A pod without workers is given back after so long, where a pool may grow (`autoscaling`)."""
    upgrade: Literal["new_cluster", "in_place"] = "new_cluster"
    """What a change of pods does. new_cluster: a second set of pods takes over, then the first one goes;
    in_place: nothing, until the pods are deleted. Serve's part is always updated in place."""
    cluster_token_secret: Name = "splitserve-cluster-token"  # noqa: S105  # a name
    """Secret whose key `token` workers and routers show each other. Never rendered: make it beforehand."""
    ray_token_secret: Name | None = None
    """Secret whose key `auth_token` opens the Ray cluster; null: the operator makes one."""
    api_key_secret: Name | None = None
    """Secret whose key `key` clients must show; instead of `http.api_key_file`."""
    hub_token_secret: Name | None = None
    """Secret whose key `token` opens gated models. Only the init container that downloads sees it."""
    image_pull_secret: Name | None = None
    """Secret with which nodes pull `deploy.image`."""
    redis_address: str | None = None
    """host:port of a Redis, so that the cluster survives the loss of its head; null: it is built anew."""
    redis_password_secret: Name | None = None
    """Secret whose key `password` opens the Redis."""
    gpu_resource: DeviceResource = "nvidia.com/gpu"
    """What the device plugin calls its GPUs; nodes with a taint of that name are tolerated."""
    tolerations: Taints = Field(default_factory=list)
    """Further taints, by their keys, of nodes that may run workers."""
    environment: Variables = Field(default_factory=dict)
    """Further variables of all containers, such as UCX_NET_DEVICES, or HTTPS_PROXY and HF_ENDPOINT for the
    download. No secrets: they would be readable."""
    network_policy: bool = True
    """Let only the pods of this cluster, the operator and monitoring reach ports other than `http.port`."""
    operator_namespace: Namespace = "kuberay-operator"
    """Where the KubeRay operator runs."""
    clients: Labels = Field(default_factory=dict)
    """Labels of the namespaces from which clients come; empty: from everywhere."""
    service_monitor: bool = False
    """Render a ServiceMonitor. Needs the Prometheus operator."""
    monitoring_namespace: Namespace = "monitoring"
    """Where Prometheus runs."""
    head: HeadConfig = Field(default_factory=HeadConfig)
    prefill: PodConfig = Field(default_factory=PodConfig)
    decode: PodConfig = Field(default_factory=PodConfig)
    models: ModelVolume = Field(default_factory=ModelVolume)
    rdma: RdmaConfig = Field(default_factory=RdmaConfig)
