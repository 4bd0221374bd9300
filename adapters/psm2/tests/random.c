/* Random operations of three endpoints of one process, compared with a model: sends of all kinds,
   sends from an endpoint to itself, receives with random masks and sources, probes, claims and
   cancels. Each operation waits until its message has arrived, so the model knows the order.

     random OPERATIONS [SEED] */
#include <psm2.h>
#include <psm2_mq.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ENDS = 3, MOST = 150, LONGEST = 20000 };

static unsigned long long seed, state, operation;

#define MUST(condition)                                                                            \
  do                                                                                               \
    if (!(condition))                                                                              \
      {                                                                                            \
        printf ("seed %llu, operation %llu, line %d: not so: %s\n", seed, operation, __LINE__,     \
                #condition);                                                                       \
        exit (1);                                                                                  \
      }                                                                                            \
  while (0)

static unsigned below (unsigned limit)
{
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (state >> 33) % limit;
}

struct message
{
  int from;
  psm2_mq_tag_t tag;
  unsigned len;
  unsigned char *bytes;
};

/* A request, and its expected result. */
struct request
{
  psm2_mq_req_t req;
  int source; /* or -1 */
  psm2_mq_tag_t tag, tagsel;
  unsigned char *into;
  unsigned room;
  enum { NOTHING, MATCHED, CANCELLED } state;
  struct message *message;
};

static psm2_ep_t ep[ENDS];
static psm2_mq_t mq[ENDS];
static psm2_epaddr_t to[ENDS][ENDS];
/* Unmatched receives, claimed messages and unexpected messages of each endpoint, oldest first. */
static struct request *posted[ENDS][MOST], *claimed[ENDS][MOST];
static struct message *waiting[ENDS][MOST];
static int posts[ENDS], waits[ENDS], claims[ENDS];
static unsigned long long sends, receives, probes, truncated, cancelled, claims_made;

static void *take (void *array, int *count, int at)
{
  void **all = array, *taken = all[at];
  memmove (all + at, all + at + 1, (--*count - at) * sizeof *all);
  return taken;
}

static int accepts (int source, psm2_mq_tag_t tag, psm2_mq_tag_t tagsel,
                    const struct message *message)
{
  for (int word = 0; word < 3; word++)
    if ((tag.tag[word] ^ message->tag.tag[word]) & tagsel.tag[word])
      return 0;
  return source < 0 || source == message->from;
}

static psm2_mq_tag_t some_tag (void)
{
  return (psm2_mq_tag_t) { { below (3), below (2) << 31, below (2), 0 } };
}

static psm2_mq_tag_t some_mask (void)
{
  static const unsigned masks[] = { 0, 1, 2, -1u, -1u, -1u };
  return (psm2_mq_tag_t) { { masks[below (6)], masks[below (6)], masks[below (6)], 0 } };
}

static void poll_all (int times)
{
  for (int time = 0; time < times; time++)
    for (int end = 0; end < ENDS; end++)
      psm2_poll (ep[end]);
}

static void check_message (int me, const psm2_mq_status2_t *status, const struct message *message)
{
  MUST (status->msg_peer == to[me][message->from] && status->msg_length == message->len);
  MUST (memcmp (status->msg_tag.tag, message->tag.tag, 12) == 0);
}

/* Completes a receive that is complete in the model. */
static void finish (int me, struct request *request)
{
  psm2_mq_status2_t status;
  psm2_error_t error;
  int tries = 0;
  while ((error = psm2_mq_test2 (&request->req, &status)) == PSM2_MQ_NO_COMPLETIONS
         && tries++ < 10000)
    poll_all (1);
  MUST (error == PSM2_OK && request->req == PSM2_MQ_REQINVALID && status.context == request);
  if (request->state == MATCHED)
    {
      struct message *message = request->message;
      unsigned len = message->len < request->room ? message->len : request->room;
      check_message (me, &status, message);
      MUST (status.nbytes == len && memcmp (request->into, message->bytes, len) == 0);
      MUST (status.error_code == (message->len > request->room ? PSM2_MQ_TRUNCATION : PSM2_OK));
      truncated += message->len > request->room;
      free (message->bytes);
      free (message);
    }
  free (request->into);
  free (request);
}

static void send_some (void)
{
  static const unsigned lens[] = { 0, 1, 8, 64, 65, 1000, 8192, 8193, LONGEST };
  int from = below (ENDS), at = below (ENDS), sync = below (5) == 0,
      blocks = from != at && !sync && below (3) == 0;
  psm2_mq_req_t req;
  psm2_mq_status2_t status;
  struct message *message = malloc (sizeof *message);
  if (waits[at] == MOST)
    return free (message);
  *message = (struct message) { from, some_tag (), lens[below (sizeof lens / sizeof *lens)], NULL };
  message->bytes = malloc (message->len + 1);
  for (unsigned byte = 0; byte < message->len; byte++)
    message->bytes[byte] = operation * 31 + byte * 7 + (byte >> 8);
  /* A blocking send of a long message waits for its receive. */
  blocks &= message->len <= 8192;
  if (blocks)
    MUST (psm2_mq_send2 (mq[from], to[from][at], 0, &message->tag, message->bytes, message->len)
          == PSM2_OK);
  else
    {
      int flags = sync ? PSM2_MQ_FLAG_SENDSYNC : 0;
      MUST (psm2_mq_isend2 (mq[from], to[from][at], flags, &message->tag, message->bytes,
                            message->len, message, &req)
            == PSM2_OK);
    }
  poll_all (3);
  sends++;
  /* Send requests are freed in `reap`. */
  for (int nth = 0; nth < posts[at]; nth++)
    {
      struct request *request = posted[at][nth];
      if (accepts (request->source, request->tag, request->tagsel, message))
        {
          take (posted[at], &posts[at], nth);
          request->state = MATCHED;
          request->message = message;
          if (!blocks)
            {
              int tries = 0;
              while (psm2_mq_test2 (&req, &status) == PSM2_MQ_NO_COMPLETIONS && tries++ < 10000)
                poll_all (1);
              MUST (req == PSM2_MQ_REQINVALID && status.error_code == PSM2_OK
                    && status.context == message);
            }
          return finish (at, request);
        }
    }
  waiting[at][waits[at]++] = message;
}

static int find (int me, int source, psm2_mq_tag_t tag, psm2_mq_tag_t tagsel)
{
  for (int nth = 0; nth < waits[me]; nth++)
    if (accepts (source, tag, tagsel, waiting[me][nth]))
      return nth;
  return -1;
}

static void receive (int me, int claim)
{
  static const unsigned rooms[] = { 0, 8, 64, 1000, LONGEST, LONGEST };
  struct request *request = calloc (1, sizeof *request);
  int nth;
  *request = (struct request){ .source = (int) below (ENDS + 1) - 1,
                               .tag = some_tag (),
                               .tagsel = some_mask () };
  request->room = rooms[below (sizeof rooms / sizeof *rooms)];
  request->into = malloc (request->room + 1);
  nth = find (me, request->source, request->tag, request->tagsel);
  psm2_epaddr_t source = request->source < 0 ? PSM2_MQ_ANY_ADDR : to[me][request->source];
  if (claim)
    {
      psm2_mq_status2_t status;
      int may = claims[me] < MOST && below (2);
      psm2_error_t error =
          may ? psm2_mq_improbe2 (mq[me], source, &request->tag, &request->tagsel, &request->req,
                                  &status)
              : psm2_mq_iprobe2 (mq[me], source, &request->tag, &request->tagsel, &status);
      MUST (error == (nth < 0 ? PSM2_MQ_NO_COMPLETIONS : PSM2_OK));
      probes++;
      if (nth >= 0)
        check_message (me, &status, waiting[me][nth]);
      if (nth >= 0 && may)
        {
          claims_made++;
          request->message = take (waiting[me], &waits[me], nth);
          claimed[me][claims[me]++] = request;
          return;
        }
      free (request->into);
      return free (request);
    }
  if (nth < 0 && posts[me] == MOST)
    {
      free (request->into);
      return free (request);
    }
  MUST (psm2_mq_irecv2 (mq[me], source, &request->tag, &request->tagsel, 0, request->into,
                        request->room, request, &request->req)
        == PSM2_OK);
  receives++;
  if (nth < 0)
    {
      posted[me][posts[me]++] = request;
      return;
    }
  request->state = MATCHED;
  request->message = take (waiting[me], &waits[me], nth);
  finish (me, request);
}

static void receive_claimed (int me)
{
  if (claims[me] == 0)
    return;
  struct request *request = take (claimed[me], &claims[me], below (claims[me]));
  MUST (psm2_mq_imrecv (mq[me], 0, request->into, request->room, request, &request->req)
        == PSM2_OK);
  request->state = MATCHED;
  finish (me, request);
}

static void cancel (int me)
{
  if (posts[me] == 0)
    return;
  struct request *request = take (posted[me], &posts[me], below (posts[me]));
  MUST (psm2_mq_cancel (&request->req) == PSM2_OK);
  request->state = CANCELLED;
  cancelled++;
  finish (me, request);
}

int main (int argc, char **argv)
{
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  unsigned long long operations = argc > 1 ? strtoull (argv[1], NULL, 10) : 10000;
  struct psm2_ep_open_opts opts;
  psm2_uuid_t key = { 23 };
  psm2_epid_t id[ENDS];
  seed = state = argc > 2 ? strtoull (argv[2], NULL, 10) : (unsigned long long) time (NULL);
  printf ("seed %llu\n", seed);
  fflush (stdout);
  MUST (psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER) == PSM2_OK);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  for (int end = 0; end < ENDS; end++)
    MUST (psm2_ep_open (key, &opts, &ep[end], &id[end]) == PSM2_OK
          && psm2_mq_init (ep[end], 0, NULL, 0, &mq[end]) == PSM2_OK);
  for (int end = 0; end < ENDS; end++)
    {
      psm2_error_t errors[ENDS];
      MUST (psm2_ep_connect (ep[end], ENDS, id, NULL, errors, to[end], 20000000000) == PSM2_OK);
    }
  for (operation = 0; operation < operations; operation++)
    {
      int me = below (ENDS);
      switch (below (8))
        {
        case 0 ... 2:
          send_some ();
          break;
        case 3 ... 4:
          receive (me, 0);
          break;
        case 5:
          receive (me, 1);
          break;
        case 6:
          receive_claimed (me);
          break;
        default:
          if (below (4) == 0)
            cancel (me);
        }
      /* Frees completed sends, in any order. */
      psm2_mq_req_t req;
      psm2_mq_status2_t status;
      while (psm2_mq_ipeek2 (mq[me], &req, &status) == PSM2_OK)
        MUST (psm2_mq_test2 (&req, &status) == PSM2_OK && status.error_code == PSM2_OK
              && status.context != NULL);
    }
  printf ("%llu sends, %llu receives (%llu truncated, %llu cancelled), %llu probes, %llu claims: "
          "all as the model has them\n",
          sends, receives, truncated, cancelled, probes, claims_made);
  for (int end = 0; end < ENDS; end++)
    MUST (psm2_ep_close (ep[end], PSM2_EP_CLOSE_FORCE, 0) == PSM2_OK);
  return 0;
}
