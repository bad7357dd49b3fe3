/**
 * Writes what Kubernetes needs from files that stand elsewhere, because kustomize reads nothing outside of its folder:
 * the PrometheusRule, from deploy/prometheus/ferry.rules.yaml.
 *
 *   node scripts/generate-kubernetes.ts
 *
 * `test/deploy/kubernetes.test.ts` compares the two, so that a changed rule cannot be committed without it.
 */
import { readFileSync, writeFileSync } from "node:fs";

const RULES = new URL("../deploy/prometheus/ferry.rules.yaml", import.meta.url);
const WRITTEN = new URL("../deploy/kubernetes/components/monitoring/prometheus-rule.yaml", import.meta.url);

const HEAD = `# Generated from deploy/prometheus/ferry.rules.yaml by scripts/generate-kubernetes.ts.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ferry
  labels: { app.kubernetes.io/name: ferry }
spec:
`;

export function prometheusRule(): string {
  const text = readFileSync(RULES, "utf8");
  const groups = text.slice(text.indexOf("\ngroups:") + 1);
  return HEAD + groups.replaceAll(/^(?=.)/gm, "  ");
}

if (import.meta.main) writeFileSync(WRITTEN, prometheusRule());
