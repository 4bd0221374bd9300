/* Wrong and random calls with peers that are attached at their first use: peers over a provider,
 * without shared memory. Every call must return a status and must not crash.
 * usage: distant [SEED [PROVIDER]] */
#include "expect.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENDS = 3, PEERS = 12, TURNS = 3000 };

static const char *provider = "tcp";
static const fp_tag tag = { 7, 0 }, exact = { 0, 0 };
static char buffer[20000];

typedef struct {
  fp_node *node;
  fp_mem memory;
  char address[FP_ADDRESS_MAX], handle[FP_HANDLE_MAX];
  size_t len, handle_len;
  /* Of any time: some are disconnected, some are of another node. */
  fp_peer peers[PEERS];
  fp_remote remotes[4];
} end;

/* Reads the current address of a node. */
static const end *address (end *of)
{
  of->len = sizeof of->address;
  EXPECT (fp_node_address (of->node, of->address, &of->len), 0);
  return of;
}

static void open_end (end *of)
{
  fp_options options = { .struct_size = sizeof options,
                         .flags = FP_NO_SHARED_MEMORY | FP_REQUIRE_FABRIC,
                         .patience_ms = 1,
                         .connect_timeout_ms = 1,
                         .peers = 8,
                         .providers = provider,
                         .interfaces = "lo" };
  EXPECT (fp_node_open (&options, &of->node), 0);
  address (of);
  EXPECT (fp_mem_alloc (of->node, 4096, &of->memory), 0);
  of->handle_len = sizeof of->handle;
  EXPECT (fp_mem_export (of->node, of->memory, of->handle, &of->handle_len), 0);
}

static fp_peer connected (end *from, const end *to)
{
  fp_peer peer = FP_ANY;
  EXPECT (fp_peer_connect (from->node, to->address, to->len, &peer), 0);
  return peer;
}

/* Two nodes that have disconnected all peers can talk, whatever happened before. */
static void talk (end *a, end *b)
{
  fp_peer to_b = connected (a, address (b)), to_a = connected (b, address (a));
  int sent = -1, got = -1;
  for (int tries = 0; tries < 100000 && got != 0 && got != -ECONNRESET; tries++) {
    if (sent != 0)
      sent = fp_send (a->node, to_b, tag, "well", 5);
    got = fp_recv (b->node, to_a, tag, exact, buffer, 5, 0, NULL);
    fp_progress (a->node);
  }
  EXPECT (got, 0);
  EXPECT (strcmp (buffer, "well"), 0);
  EXPECT (fp_peer_disconnect (a->node, to_b), 0);
  EXPECT (fp_peer_disconnect (b->node, to_a), 0);
}

/* Whether a call ended in one of the ways that a call with this peer may end. */
static int fine (int status, int gone)
{
  if (gone)
    return status == gone;
  return status >= 0 || status == -ENOTCONN || status == -ETIMEDOUT || status == -EAGAIN
         || status == -ECONNRESET || status == -ESHUTDOWN || status == -EINVAL;
}

/* Makes every call that names a peer or its memory. All return `gone` if it is not 0. */
static void every_call (end *a, fp_peer peer, int gone)
{
  fp_request request;
  fp_remote remote = 0;
  fp_message message;
  fp_token token;
#define FINE(call) EXPECT (fine (call, gone), 1)
  FINE (fp_peer_state (a->node, peer));
  FINE (fp_fence (a->node, peer));
  FINE (fp_quiet (a->node, peer, 0));
  FINE (fp_probe (a->node, peer, tag, exact, 0, &message));
  FINE (fp_probe (a->node, peer, tag, exact, 1, &message));
  FINE (fp_recv (a->node, peer, tag, exact, buffer, 8, 1, &message));
  FINE (fp_wait_signal (a->node, a->memory, 0, FP_EQ, 1, peer, 1, NULL));
  if (fp_post_recv (a->node, peer, tag, exact, a->memory, 0, 8, 1, &request) == 0)
    FINE (fp_cancel (a->node, request));
  FINE (fp_mem_import (a->node, peer, a->handle, a->handle_len, &remote));
  FINE (fp_send (a->node, peer, tag, "x", 1));
  FINE (fp_send (a->node, peer, tag, buffer, sizeof buffer));
  FINE (fp_send_mem (a->node, peer, tag, a->memory, 0, 64, &token));
  FINE (fp_mem_import (a->node, peer, a->handle, a->handle_len, &remote));
  FINE (fp_quiet (a->node, peer, 1));
}

/* Every byte of an address in turn has other values. The peer is connected, used and disconnected,
 * or the address is refused. */
static void damaged_addresses (end *a, const end *b)
{
  char address[FP_ADDRESS_MAX];
  size_t used = 0;
  for (size_t at = 0; at < b->len; at++)
    for (int turn = 0; turn < 3; turn++) {
      fp_peer peer;
      memcpy (address, b->address, b->len);
      address[at] = turn == 0 ? (char) (address[at] ^ 1) : (char) below (256);
      if (fp_peer_connect (a->node, address, b->len, &peer) < 0)
        continue;
      used++;
      every_call (a, peer, 0);
      EXPECT (fp_peer_disconnect (a->node, peer), 0);
    }
  printf ("%zu damaged addresses were used\n", used);
  /* Cut short, and with noise behind them. */
  for (size_t len = 0; len < b->len; len++)
    EXPECT (fp_peer_connect (a->node, b->address, len, &(fp_peer) { 0 }), -EINVAL);
  EXPECT (fp_peer_connect (a->node, b->address, b->len + 1, &(fp_peer) { 0 }), -EINVAL);
}

/* A random call of one node, with peers, memory and addresses of any node and any time. */
static void any_call (end *all)
{
  end *of = &all[below (ENDS)], *other = &all[below (ENDS)];
  fp_peer *peer = &of->peers[below (PEERS)], named = below (8) ? *peer : other->peers[0];
  fp_remote *remote = &of->remotes[below (4)];
  fp_completion ends[4];
  fp_request request;
  fp_message message;
  uint64_t before;
  char handle[FP_HANDLE_MAX];
  switch (below (18)) {
  case 0: case 1: case 2:
    /* A node that nobody disconnects stays a peer, and is returned if it is connected again. */
    fp_peer_disconnect (of->node, *peer);
    fp_peer_connect (of->node, other->address, other->len, peer);
    break;
  case 3: fp_peer_disconnect (of->node, named); break;
  case 4:
    memcpy (handle, other->handle, other->handle_len);
    if (below (4) == 0)
      handle[below (other->handle_len)] ^= (char) below (256);
    fp_mem_import (of->node, named, handle, other->handle_len, remote);
    break;
  case 5: fp_mem_release (of->node, *remote); break;
  case 6: fp_put (of->node, of->memory, 0, below (4097), *remote, 0, NULL); break;
  case 7:
    fp_put_signal (of->node, of->memory, 0, below (300), *remote, 64, *remote, 0, FP_SIGNAL_ADD, 1,
                   NULL);
    break;
  case 8: fp_get (of->node, of->memory, 0, 8, *remote, 0, NULL); break;
  case 9: fp_atomic_fetch (of->node, *remote, 8, FP_AMO_ADD, 8, 1, 0, &before, 1); break;
  case 10: fp_send (of->node, named, tag, buffer, below (2) ? 8 : sizeof buffer); break;
  case 11: fp_recv (of->node, named, tag, exact, buffer, sizeof buffer, 0, &message); break;
  case 12: fp_post_recv (of->node, named, tag, exact, of->memory, 0, 64, 1, &request); break;
  case 13: fp_quiet (of->node, below (2) ? FP_ANY : named, 0); break;
  case 14: fp_peer_state (of->node, named); break;
  case 15: fp_poll (of->node, ends, 4); break;
  case 16: fp_wait_signal (of->node, of->memory, 0, FP_EQ, 99, named, 0, NULL); break;
  default:
    /* Its address stays with the others, who use it. */
    if (below (20) == 0) {
      EXPECT (fp_node_close (of->node, 0) <= 0, 1);
      open_end (of);
    }
  }
}

int main (int count, char **arguments)
{
  uint64_t seed = count > 1 ? strtoull (arguments[1], NULL, 10) : 1;
  random_state = seed * 2654435761u + 1;
  if (count > 2)
    provider = arguments[2];
  static end all[ENDS];
  end *a = &all[0], *b = &all[1], closed;
  for (int at = 0; at < ENDS; at++)
    open_end (&all[at]);

  /* Nobody connects back. The peer is attached in the middle of the calls. */
  fp_peer peer = connected (a, b);
  EXPECT (connected (a, b) == peer, 1);
  EXPECT (fp_send (a->node, peer, tag, "x", 1), 0);
  EXPECT (fp_quiet (a->node, peer, 0), -ETIMEDOUT);
  EXPECT (connected (a, b) == peer, 1);
  EXPECT (fp_peer_disconnect (a->node, peer), 0);
  peer = connected (a, b);
  every_call (a, peer, 0);
  EXPECT (connected (a, b) == peer, 1);
  EXPECT (fp_peer_disconnect (a->node, peer), 0);
  every_call (a, peer, -ENXIO);
  EXPECT (fp_peer_disconnect (a->node, peer), -ENXIO);

  /* The peer has closed its node before it was used. */
  open_end (&closed);
  EXPECT (fp_node_close (closed.node, 0), 0);
  peer = connected (a, &closed);
  every_call (a, peer, 0);
  EXPECT (fp_peer_disconnect (a->node, peer), 0);

  /* Disconnected in its first use at one end, then at both, then used by both at once. */
  for (int turn = 0; turn < 20; turn++) {
    peer = connected (a, b);
    fp_peer back = connected (b, a);
    fp_send (a->node, peer, tag, "x", 1);
    if (turn % 2)
      fp_send (b->node, back, tag, "x", 1);
    for (int n = 0; n < turn; n++)
      fp_progress (turn % 3 ? a->node : b->node);
    EXPECT (fp_peer_disconnect (a->node, peer), 0);
    if (turn % 4 < 2)
      EXPECT (fp_peer_disconnect (b->node, back), 0);
  }
  damaged_addresses (a, b);

  for (int n = 0; n < TURNS; n++)
    any_call (all);
  /* The nodes still work, with each other and with new ones. */
  for (int at = 0; at < ENDS; at++)
    for (int n = 0; n < PEERS; n++)
      fp_peer_disconnect (all[at].node, all[at].peers[n]);
  EXPECT (fp_node_close (b->node, 0) <= 0, 1);
  open_end (b);
  memset (buffer, 0, sizeof buffer);
  talk (b, &all[2]);
  talk (a, &all[2]);
  for (int at = 0; at < ENDS; at++)
    EXPECT (fp_node_close (all[at].node, 100) <= 0, 1);
  printf ("%d cases and %d random calls, seed %llu: %d wrong\n", cases, TURNS,
          (unsigned long long) seed, failed);
  return failed != 0;
}
