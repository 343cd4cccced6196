// Where what is remembered is kept, in the words and classes of the page.

export const TIERS = {
  memory: { from: "from memory", where: "in memory" },
  host: { from: "from host memory", where: "in host memory" },
  disk: { from: "from disk", where: "on disk" },
  remote: { from: "from the remote store", where: "in the remote store" },
  computed: { from: "looked at now", where: "nowhere yet" },
};

/** Where a picture's part of a prompt comes from, by what a report says of it. */
export function tierOf({ status, reason, features, tier: lay }) {
  const tier = status === "reused" ? (lay ?? reason) : features;
  if (tier in TIERS) return tier;
  return status === "reused" ? "memory" : "computed";
}
