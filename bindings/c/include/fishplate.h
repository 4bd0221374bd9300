/* Fishplate: put, get, put-signal, atomics and tagged messages between processes, over shared memory
 * and libfabric rails, in one order. See docs/c.md for a first program.
 *
 * Every function that returns int returns 0 or more if it did what it says, and a negative number
 * of errno.h if not; fp_last_error () then says in words what was wrong. One that fails has done
 * nothing, unless it says otherwise. Handles may be null, closed or made up: that is an error, and
 * never undefined. Pointers to buffers, strings and results must be good for the call.
 *
 * A node belongs to the thread that opened it, until that calls fp_node_unbind; then to the first
 * thread that calls into it. Calls of other threads fail with -EPERM, and those of a signal handler
 * that has interrupted another with -EBUSY; one may not be called from it otherwise. No function calls back, starts a thread (but for one that closes
 * descriptors), sets a signal handler or reads the environment.
 *
 * Timeouts are in milliseconds: 0 looks once, a negative one never expires. */
#ifndef FISHPLATE_H
#define FISHPLATE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header: major, minor and patch in one number. */
#define FP_VERSION 0x000100

typedef struct fp_node fp_node;
/* A peer. It stays good until fp_peer_disconnect. */
typedef uint32_t fp_peer;
/* Memory of this node, and memory of a peer that was imported. */
typedef uint64_t fp_mem;
typedef uint64_t fp_remote;
/* An operation in flight, and a receive. */
typedef uint64_t fp_token;
typedef uint64_t fp_request;

/* Every peer, or anybody. */
#define FP_ANY UINT32_MAX
/* The token of an operation that was over when its function returned: nothing more is told of it. */
#define FP_OVER UINT64_MAX

/* The longest address, and the longest handle of memory, in bytes. */
#define FP_ADDRESS_MAX 1024
#define FP_HANDLE_MAX 512

/* ---- Errors ---------------------------------------------------------------------------------- */

/* FP_VERSION of the library. */
uint32_t fp_version (void);
/* What a status means. A constant. */
const char *fp_strerror (int status);
/* What the last function of this thread that failed says of it. Good until the next one fails. */
const char *fp_last_error (void);

/* ---- Nodes ----------------------------------------------------------------------------------- */

/* Peers of this host are not reached through shared memory. */
#define FP_NO_SHARED_MEMORY 1u
/* No libfabric rails; or at least one, without which fp_node_open fails. */
#define FP_NO_FABRIC 2u
#define FP_REQUIRE_FABRIC 4u
/* The node has a descriptor to wait on also without libfabric rails: fp_node_fd. */
#define FP_WAIT_FD 8u

/* Settings. Set all to zero, then struct_size; fields that stay 0 have their defaults. */
typedef struct fp_options {
  size_t struct_size;          /* sizeof (fp_options) */
  uint32_t flags;              /* FP_NO_SHARED_MEMORY and so on */
  uint32_t peers;              /* most peers: 64 */
  uint32_t regions;            /* most regions: 64; long messages from and into buffers use some */
  uint32_t imports;            /* most imported regions: 256 */
  uint32_t operations;         /* most operations in flight: 1024 */
  uint32_t patience_ms;        /* how long an operation waits for room: 10,000 */
  uint32_t connect_timeout_ms; /* how long the first use waits for a peer: 10,000 */
  uint32_t max_rails;          /* most libfabric rails: 16 */
  const char *providers;       /* separated by commas; default: the first that is usable */
  const char *interfaces;      /* one rail per mention; default: near ones */
} fp_options;

/* Opens a node. `options` may be null. A process may have 64. Slow: loads libfabric. */
int fp_node_open (const fp_options *options, fp_node **node);
/* Closes a node: waits until everything sent is applied and every peer knows that this node leaves.
 * The handle is invalid afterwards, even on errors. -ETIMEDOUT: something was not finished in time. */
int fp_node_close (fp_node *node, int64_t timeout_ms);
/* The next thread that calls into the node owns it. */
int fp_node_unbind (fp_node *node);
/* Copies out the address that peers connect to. `*len` is the size of the buffer, and on return the
 * size that is needed: -EMSGSIZE if that is larger. */
int fp_node_address (fp_node *node, void *address, size_t *len);
/* Makes progress without waiting. Returns the number of events. */
int fp_progress (fp_node *node);

/* For event loops: prepares a wait, makes progress, and returns the descriptor to wait on until it is
 * readable; never read it. `*timeout_ms` is how long to wait at most, or 0: do not wait, there is
 * something to do. Call it before each wait, then test once more what the program waits for.
 * -ENOTSUP: there is none, as the node was opened without FP_WAIT_FD or a provider has none. */
int fp_node_fd (fp_node *node, int *timeout_ms);

/* ---- Peers ----------------------------------------------------------------------------------- */

/* Connects a peer by its address. The peer does the same with ours, in any order. Does not wait. */
int fp_peer_connect (fp_node *node, const void *address, size_t len, fp_peer *peer);
/* 1: connected. 0: not connected yet. -ECONNRESET: failed. -ESHUTDOWN: closed in good order. */
int fp_peer_state (fp_node *node, fp_peer peer);
/* Disconnects a peer: operations in flight to it fail, and its memory is released. */
int fp_peer_disconnect (fp_node *node, fp_peer peer);

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Allocates zeroed memory that peers of this host can map and NICs can reach. */
int fp_mem_alloc (fp_node *node, size_t len, fp_mem *memory);
/* Registers memory of the program, at a multiple of 8 bytes. Peers write it at any time; it must
 * stay until fp_mem_free returned 0 or the node was closed, and until every peer that has imported
 * it has released it. */
int fp_mem_register (fp_node *node, void *start, size_t len, fp_mem *memory);
/* -EBUSY: an operation, a receive or an import still uses it. -EADDRINUSE: it is freed, but a
 * provider still holds registered memory: never reuse that. */
int fp_mem_free (fp_node *node, fp_mem memory);
/* Copies out the handle with which peers import the memory; see fp_node_address for `*len`. */
int fp_mem_export (fp_node *node, fp_mem memory, void *handle, size_t *len);
/* Waits until the peer is connected, at most connect_timeout_ms. */
int fp_mem_import (fp_node *node, fp_peer peer, const void *handle, size_t len, fp_remote *remote);
int fp_mem_release (fp_node *node, fp_remote remote);
/* Copy bytes into memory of this node, and out of it. */
int fp_mem_write (fp_node *node, fp_mem memory, uint64_t offset, const void *from, size_t len);
int fp_mem_read (fp_node *node, fp_mem memory, uint64_t offset, void *into, size_t len);
/* Stores a 64-bit word at a multiple of 8 bytes with release ordering. fp_wait_signal loads one. */
int fp_mem_store (fp_node *node, fp_mem memory, uint64_t offset, uint64_t value);

/* ---- One-sided operations ---------------------------------------------------------------------
 * Without room they make progress for up to patience_ms, and then fail with -EAGAIN. With a token,
 * fp_poll or fp_test report the completion; with a null token only fp_quiet does. Memory must not
 * change until then. */

#define FP_SIGNAL_SET 1
#define FP_SIGNAL_ADD 2

enum {
  FP_AMO_SET = 1, FP_AMO_ADD, FP_AMO_INC, FP_AMO_AND, FP_AMO_OR, FP_AMO_XOR,
  FP_AMO_SWAP, FP_AMO_COMPARE_SWAP, FP_AMO_FETCH
};
enum { FP_EQ = 1, FP_NE, FP_GE, FP_GT, FP_LE, FP_LT };

int fp_put (fp_node *node, fp_mem memory, uint64_t offset, size_t len, fp_remote remote,
            uint64_t remote_offset, fp_token *token);
/* The bytes may be reused when it returns. */
int fp_put_bytes (fp_node *node, const void *from, size_t len, fp_remote remote, uint64_t remote_offset);
/* The signal changes its 64-bit word once the data, and all that was sent to the peer before, has
 * landed. With a `len` of 0 there is no data, and `memory` and `remote` may be anything. */
int fp_put_signal (fp_node *node, fp_mem memory, uint64_t offset, size_t len, fp_remote remote,
                   uint64_t remote_offset, fp_remote signal_remote, uint64_t signal_offset, int op,
                   uint64_t value, fp_token *token);
int fp_get (fp_node *node, fp_mem memory, uint64_t offset, size_t len, fp_remote remote,
            uint64_t remote_offset, fp_token *token);
/* `width`: 1, 2, 4 or 8 bytes. `compare` counts for FP_AMO_COMPARE_SWAP. */
int fp_atomic (fp_node *node, fp_remote remote, uint64_t offset, int op, uint32_t width, uint64_t operand,
               uint64_t compare, fp_token *token);
int fp_atomic_fetch (fp_node *node, fp_remote remote, uint64_t offset, int op, uint32_t width,
                     uint64_t operand, uint64_t compare, uint64_t *before, int64_t timeout_ms);
/* Writes to the peer that follow land after all that was sent before. Does not wait. */
int fp_fence (fp_node *node, fp_peer peer);
/* Waits until all that was sent to the peer, or to FP_ANY, is applied there. */
int fp_quiet (fp_node *node, fp_peer peer, int64_t timeout_ms);
/* Waits until the 64-bit word compares so with `value`. `from` is the peer that signals, so that
 * its failure ends the wait, or FP_ANY. `seen`, which may be null, gets the word. */
int fp_wait_signal (fp_node *node, fp_mem memory, uint64_t offset, int compare, uint64_t value,
                    fp_peer from, int64_t timeout_ms, uint64_t *seen);

/* ---- Tagged messages --------------------------------------------------------------------------
 * A message matches a receive that names its sender or FP_ANY, and whose tag is the same but for
 * the bits that `ignore` has set. Messages of one sender match in the order sent. */

typedef struct fp_tag {
  uint64_t low;
  uint32_t high;
} fp_tag;

typedef struct fp_message {
  fp_tag tag;
  uint64_t len;   /* what was sent, in bytes */
  uint64_t claim; /* of fp_probe, for fp_recv_claimed */
  fp_peer source;
} fp_message;

/* The bytes may be reused when it returns; long ones are copied. */
int fp_send (fp_node *node, fp_peer to, fp_tag tag, const void *from, size_t len);
int fp_send_mem (fp_node *node, fp_peer to, fp_tag tag, fp_mem memory, uint64_t offset, size_t len,
                 fp_token *token);
/* Waits for a message. -EMSGSIZE: it was longer than the buffer, and is lost. `message` may be null. */
int fp_recv (fp_node *node, fp_peer source, fp_tag tag, fp_tag ignore, void *into, size_t len,
             int64_t timeout_ms, fp_message *message);
/* fp_poll tells the end, with `word`. */
int fp_post_recv (fp_node *node, fp_peer source, fp_tag tag, fp_tag ignore, fp_mem memory,
                  uint64_t offset, size_t len, uint64_t word, fp_request *request);
/* 1: taken back. 0: it has matched. It ends either way. */
int fp_cancel (fp_node *node, fp_request request);
/* 1: such a message is here. 0: it is not. With `claim` no other receive gets it. */
int fp_probe (fp_node *node, fp_peer source, fp_tag tag, fp_tag ignore, int claim, fp_message *message);
/* Receives a message that was claimed; as fp_post_recv. */
int fp_recv_claimed (fp_node *node, uint64_t claim, fp_mem memory, uint64_t offset, size_t len,
                     uint64_t word, fp_request *request);

/* ---- What has ended --------------------------------------------------------------------------- */

#define FP_OPERATION 1u
#define FP_RECEIVE 2u

typedef struct fp_completion {
  uint32_t kind;  /* FP_OPERATION or FP_RECEIVE */
  int32_t status; /* 0, or a negative number: -EMSGSIZE of a receive whose buffer was too short */
  uint64_t id;    /* the token, or the request */
  uint64_t word;  /* of fp_post_recv */
  uint64_t value; /* bytes that a receiver took, or that a receive has in its buffer */
  fp_message message; /* of a receive that has matched */
  uint32_t may_land;  /* 1: it failed, and its memory must not be reused before it was freed */
} fp_completion;

/* Makes progress once, and takes up to `count` ends. Returns how many. */
int fp_poll (fp_node *node, fp_completion *completions, size_t count);
/* 1: the operation has ended, and is taken. 0: it has not. Makes no progress. */
int fp_test (fp_node *node, fp_token token, fp_completion *completion);

/* Counters, since the node was opened. Set struct_size before. */
typedef struct fp_stats_t {
  size_t struct_size;
  uint64_t posted, arrived, out_of_order, duplicates, stale, applied, acks_alone, refused, failed, passes;
} fp_stats_t;

int fp_stats (fp_node *node, fp_stats_t *stats);

#ifdef __cplusplus
}
#endif

#endif
