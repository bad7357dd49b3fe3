/**
 * What an object of Kubernetes, KEDA, the Prometheus Operator or the Gateway API may hold, as far as deploy/kubernetes
 * uses it: every field with its type, and which must be there. A field that is not in the table is a mistake, because
 * Kubernetes would drop it in silence. Written from the public API references; a new field is a new row here.
 *
 *   "string"  "number"  "boolean"     a scalar
 *   "port"                            a number, or the name of a port
 *   "quantity"                        as in "1", 1Gi: text, never a number
 *   ["a", "b"]                        one of these words
 *   { name: …, "name?": … }           an object; with ? the field may be left out
 *   { "*": … }                        any names
 *   { each: … }                       a list
 */
export type Shape = "string" | "number" | "boolean" | "port" | "quantity" | readonly string[] | Fields;
export interface Fields {
  readonly [field: string]: Shape;
}

const NAMES: Fields = { "*": "string" };
const META: Fields = { name: "string", "namespace?": "string", "labels?": NAMES, "annotations?": NAMES };
const SELECTOR: Fields = { matchLabels: NAMES };

const PROBE: Fields = {
  httpGet: { path: "string", port: "port" },
  periodSeconds: "number",
  timeoutSeconds: "number",
  failureThreshold: "number",
};

const ENV: Fields = {
  name: "string",
  valueFrom: {
    "secretKeyRef?": { name: "string", key: "string" },
    "fieldRef?": { fieldPath: "string" },
  },
};

const CONTAINER: Fields = {
  name: "string",
  image: "string",
  "args?": { each: "string" },
  ports: { each: { name: "string", containerPort: "number", protocol: ["TCP"] } },
  "env?": { each: ENV },
  startupProbe: PROBE,
  readinessProbe: PROBE,
  "livenessProbe?": PROBE,
  "lifecycle?": { preStop: { sleep: { seconds: "number" } } },
  resources: { requests: { "*": "quantity" }, limits: { "*": "quantity" } },
  securityContext: {
    allowPrivilegeEscalation: "boolean",
    readOnlyRootFilesystem: "boolean",
    capabilities: { drop: { each: ["ALL"] } },
  },
  "volumeMounts?": { each: { name: "string", mountPath: "string", "readOnly?": "boolean" } },
};

const POD: Fields = {
  metadata: { labels: NAMES },
  spec: {
    automountServiceAccountToken: "boolean",
    enableServiceLinks: "boolean",
    terminationGracePeriodSeconds: "number",
    securityContext: {
      runAsNonRoot: "boolean",
      runAsUser: "number",
      runAsGroup: "number",
      seccompProfile: { type: ["RuntimeDefault"] },
    },
    "topologySpreadConstraints?": {
      each: {
        maxSkew: "number",
        topologyKey: ["topology.kubernetes.io/zone", "kubernetes.io/hostname"],
        whenUnsatisfiable: ["ScheduleAnyway", "DoNotSchedule"],
        labelSelector: SELECTOR,
        matchLabelKeys: { each: "string" },
      },
    },
    containers: { each: CONTAINER },
    "volumes?": { each: { name: "string", "configMap?": { name: "string" }, "emptyDir?": {} } },
  },
};

const TARGET: Fields = { apiVersion: ["apps/v1"], kind: ["Deployment", "StatefulSet"], name: "string" };

const BEHAVIOR: Fields = {
  scaleUp: { stabilizationWindowSeconds: "number" },
  scaleDown: {
    stabilizationWindowSeconds: "number",
    policies: { each: { type: ["Percent", "Pods"], value: "number", periodSeconds: "number" } },
  },
};

const PEER: Fields = {
  "podSelector?": SELECTOR,
  "namespaceSelector?": SELECTOR,
  "ipBlock?": { cidr: "string" },
};
const POLICY_PORTS: Fields = { each: { protocol: ["TCP", "UDP"], port: "port" } };

/** "apiVersion kind" → the fields beside these two. */
export const SHAPES: Readonly<Record<string, Fields>> = {
  "v1 Namespace": { metadata: META },
  "v1 ConfigMap": { metadata: META, data: NAMES },
  "v1 Service": {
    metadata: META,
    spec: {
      "clusterIP?": ["None"],
      "publishNotReadyAddresses?": "boolean",
      selector: NAMES,
      ports: {
        each: {
          name: "string",
          port: "number",
          targetPort: "port",
          protocol: ["TCP"],
          appProtocol: "string",
        },
      },
    },
  },
  "apps/v1 Deployment": {
    metadata: META,
    spec: {
      "replicas?": "number",
      revisionHistoryLimit: "number",
      selector: SELECTOR,
      strategy: {
        type: ["RollingUpdate"],
        rollingUpdate: { maxUnavailable: "number", maxSurge: "number" },
      },
      template: POD,
    },
  },
  "apps/v1 StatefulSet": {
    metadata: META,
    spec: {
      serviceName: "string",
      podManagementPolicy: ["Parallel", "OrderedReady"],
      revisionHistoryLimit: "number",
      selector: SELECTOR,
      template: POD,
    },
  },
  "autoscaling/v2 HorizontalPodAutoscaler": {
    metadata: META,
    spec: {
      scaleTargetRef: TARGET,
      minReplicas: "number",
      maxReplicas: "number",
      metrics: {
        each: {
          type: ["Resource"],
          resource: {
            name: ["cpu"],
            target: { type: ["Utilization"], averageUtilization: "number" },
          },
        },
      },
      behavior: BEHAVIOR,
    },
  },
  "policy/v1 PodDisruptionBudget": {
    metadata: META,
    spec: {
      maxUnavailable: "number",
      unhealthyPodEvictionPolicy: ["AlwaysAllow", "IfHealthyBudget"],
      selector: SELECTOR,
    },
  },
  "networking.k8s.io/v1 NetworkPolicy": {
    metadata: META,
    spec: {
      podSelector: SELECTOR,
      policyTypes: { each: ["Ingress", "Egress"] },
      "ingress?": { each: { "from?": { each: PEER }, ports: POLICY_PORTS } },
      "egress?": { each: { "to?": { each: PEER }, ports: POLICY_PORTS } },
    },
  },
  "networking.k8s.io/v1 Ingress": {
    metadata: META,
    spec: {
      ingressClassName: "string",
      tls: { each: { hosts: { each: "string" }, secretName: "string" } },
      rules: {
        each: {
          host: "string",
          http: {
            paths: {
              each: {
                path: "string",
                pathType: ["Prefix", "Exact"],
                backend: { service: { name: "string", port: { name: "string" } } },
              },
            },
          },
        },
      },
    },
  },
  "gateway.networking.k8s.io/v1 HTTPRoute": {
    metadata: META,
    spec: {
      parentRefs: { each: { name: "string", namespace: "string" } },
      hostnames: { each: "string" },
      rules: {
        each: {
          matches: { each: { path: { type: ["PathPrefix", "Exact"], value: "string" } } },
          timeouts: { request: "string" },
          backendRefs: { each: { name: "string", port: "number" } },
        },
      },
    },
  },
  "keda.sh/v1alpha1 ScaledObject": {
    metadata: META,
    spec: {
      scaleTargetRef: TARGET,
      pollingInterval: "number",
      cooldownPeriod: "number",
      minReplicaCount: "number",
      maxReplicaCount: "number",
      fallback: { failureThreshold: "number", replicas: "number" },
      advanced: { horizontalPodAutoscalerConfig: { behavior: BEHAVIOR } },
      triggers: {
        each: {
          type: ["prometheus", "metrics-api"],
          metricType: ["AverageValue"],
          // KEDA takes text alone here, numbers and booleans included.
          metadata: NAMES,
          "authenticationRef?": { name: "string" },
        },
      },
    },
  },
  "keda.sh/v1alpha1 TriggerAuthentication": {
    metadata: META,
    spec: { secretTargetRef: { each: { parameter: "string", name: "string", key: "string" } } },
  },
  "monitoring.coreos.com/v1 ServiceMonitor": {
    metadata: META,
    spec: {
      jobLabel: "string",
      selector: SELECTOR,
      endpoints: {
        each: {
          port: "string",
          path: "string",
          interval: "string",
          authorization: { type: ["Bearer"], credentials: { name: "string", key: "string" } },
        },
      },
    },
  },
  "monitoring.coreos.com/v1 PrometheusRule": {
    metadata: META,
    spec: {
      groups: {
        each: {
          name: "string",
          rules: {
            each: {
              "record?": "string",
              "alert?": "string",
              expr: "string",
              "for?": "string",
              "labels?": NAMES,
              "annotations?": NAMES,
            },
          },
        },
      },
    },
  },
};

/** What does not fit, one line each with its place. */
export function flaws(node: unknown, shape: Shape, place = ""): string[] {
  if (typeof shape === "string") return scalarFits(node, shape) ? [] : [`${place}: is no ${shape}`];
  if (isWords(shape))
    return shape.includes(node as string) ? [] : [`${place}: ${String(node)} is none of ${shape.join(", ")}`];
  if (shape["each"] !== undefined) {
    if (!Array.isArray(node)) return [`${place}: is no list`];
    return node.flatMap((each, at) => flaws(each, shape["each"]!, `${place}[${at}]`));
  }
  if (node === null || typeof node !== "object" || Array.isArray(node)) return [`${place}: is no object`];
  const found = Object.entries(node).flatMap(([field, value]) => {
    const known = shape[field] ?? shape[`${field}?`] ?? shape["*"];
    return known === undefined
      ? [`${place}.${field}: no such field`]
      : flaws(value as unknown, known, `${place}.${field}`);
  });
  const missing = Object.keys(shape)
    .filter((field) => field !== "*" && !field.endsWith("?") && !(field in node))
    .map((field) => `${place}.${field}: is missing`);
  return [...found, ...missing];
}

function isWords(shape: readonly string[] | Fields): shape is readonly string[] {
  return Array.isArray(shape);
}

function scalarFits(node: unknown, kind: "string" | "number" | "boolean" | "port" | "quantity"): boolean {
  if (kind === "port") return typeof node === "string" || Number.isInteger(node);
  if (kind === "quantity") return typeof node === "string" && /^\d+(\.\d+)?(m|[KMGT]i)?$/.test(node);
  return typeof node === kind;
}
