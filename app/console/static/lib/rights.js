// What the key may do, said before something is tried that the server would refuse.
import { get, useData } from "./api.js";
import { html } from "./ui.js";

// {me, may}: the key, and whether it has a permission. Until the server has told, nothing is held against it.
export function useRights() {
  const { data: me } = useData((signal) => get("auth/apikey/me", {}, signal), []);
  return { me, may: (permission) => !me || me.permissions.includes(permission) };
}

// Why a button below cannot be pressed. `id` is what that button is described by.
export function Lacks({ id, me, permission, what }) {
  if (!me || me.permissions.includes(permission)) return null;
  const reason = me.role === "read-only" ? `its role is ${me.role}` : `it is narrowed to ${me.permissions.join(", ") || "nothing"}`;
  return html`<div class="problem note" id=${id}><p>This key may not ${what}: ${reason}, and that needs the permission <code>${permission}</code>.${" "}
    Sign in with a key of role member, owner or admin that has it.</p></div>`;
}
